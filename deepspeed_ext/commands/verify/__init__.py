"""Trains a small model with a user's own config and with torch's plain optimizer, and compares the
two"""
