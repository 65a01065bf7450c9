// Runs the worker's passes on numbers that depend on nothing but this file, and writes all results to standard output.
//
// Each array is a line "NAME TYPE COUNT" and its bytes. Compiled by instruction_sets.py, for this CPU and for others.

#include <cstdio>
#include <vector>

#include "adam_pass.cpp"
#include "adam_vectors.cpp"
#include "code_pass.cpp"
#include "code_vectors.cpp"
#include "mean_pass.cpp"
#include "threads.cpp"

namespace {

constexpr int64_t kNumel = 5003, kBlock = 32, kBlocks = (kNumel + kBlock - 1) / kBlock;
constexpr int32_t kSteps = 3;
const char *const kTypes[3] = {"float32", "bfloat16", "float16"};

struct Random {
    uint64_t state;
    float operator()() {  // of -1 to 1, with 23 bits
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<float>(static_cast<int32_t>(state >> 40) - (1 << 23)) / (1 << 23);
    }
};

std::vector<float> numbers(uint64_t seed, float factor, bool positive = false) {
    Random random{seed};
    std::vector<float> found(kNumel);
    for (float &x : found) {
        x = random() * factor;
        if (positive && x < 0) x = -x;
    }
    return found;
}

std::vector<char> converted(const std::vector<float> &values, int32_t type) {
    std::vector<char> found(values.size() * (type == kFloat32 ? 4 : 2));
    for (size_t i = 0; i < values.size(); ++i) {
        const float x = values[i];
        const uint16_t half = type == kBFloat16 ? Element<kBFloat16>::store(x) : Element<kFloat16>::store(x);
        if (type == kFloat32)
            std::memcpy(&found[4 * i], &x, 4);
        else
            std::memcpy(&found[2 * i], &half, 2);
    }
    return found;
}

void write(const char *name, const char *type, const void *array, int64_t numel) {
    std::printf("%s %s %lld\n", name, type, static_cast<long long>(numel));
    const size_t size = std::strcmp(type, "float32") == 0 ? 4 : std::strcmp(type, "uint8") == 0 ? 1 : 2;
    std::fwrite(array, size, numel, stdout);
}

struct State {
    std::vector<float> p = numbers(1, 0.1f), m = numbers(2, 1e-3f), v = numbers(3, 1e-4f, true);
    std::vector<float> means = std::vector<float>(kBlocks);
    std::vector<std::vector<char>> grads;
    std::vector<const void *> addresses;
    std::vector<char> published;
    int32_t published_type;

    State(int32_t grad_type, int32_t published_type)
        : published(kNumel * (published_type == kFloat32 ? 4 : 2)), published_type(published_type) {
        for (int32_t k = 0; k < kSteps; ++k) grads.push_back(converted(numbers(10 + k, 1e-2f), grad_type));
        for (auto &each : grads) addresses.push_back(each.data());
    }

    void write_all() const {
        write("p", "float32", p.data(), kNumel);
        write("m", "float32", m.data(), kNumel);
        write("v", "float32", v.data(), kNumel);
        write("means", "float32", means.data(), kBlocks);
        write("published", kTypes[published_type], published.data(), kNumel);
    }
};

void adam(int32_t grad_type, int32_t published_type, bool decoupled, int32_t threads) {
    State s(grad_type, published_type);
    const float decay = decoupled ? 0.9999f : 1.0f, l2 = decoupled ? 0.0f : 0.1f;
    const std::vector<AdamStep> steps(kSteps, {0.1f, 0.95f, 0.05f, 1e-8f, decay, l2, 2e-3f, 1.5f, 0.5f});
    const AdamPass pass{s.p.data(),    s.m.data(),          s.v.data(), s.addresses.data(), steps.data(),
                        s.published.data(), s.means.data(), kNumel,     kBlock,             kSteps,
                        grad_type,     published_type,      threads,    0.99f,              1e-3f,
                        decoupled ? 0.0f : 1e-5f,           2e-4f,      1.5f,               1e-8f};
    dsext_adam_pass(&pass);
    s.write_all();
}

void adam_of_codes(int32_t grad_type, int32_t published_type, int32_t threads) {
    State s(grad_type, published_type);
    std::vector<uint8_t> m(kNumel), v(kNumel), m_scales(kBlocks), v_scales(kBlocks);
    const std::vector<AdamStep> steps(kSteps, {0.1f, 0.95f, 0.05f, 1e-8f, 0.9999f, 0.0f, 2e-3f, 1.5f, 0.5f, 77});
    AdamPass pass{s.p.data(),    m.data(),       v.data(), s.addresses.data(), steps.data(),
                  s.published.data(), s.means.data(), kNumel,   kBlock,             kSteps,
                  grad_type,     published_type, threads,  0.99f,              1e-3f,
                  0.0f,          2e-4f,          1.5f,     1e-8f};
    pass.moment_dtype = kCodes, pass.m_scales = m_scales.data(), pass.v_scales = v_scales.data();
    dsext_adam_pass(&pass);
    write("p", "float32", s.p.data(), kNumel);
    write("m", "uint8", m.data(), kNumel);
    write("v", "uint8", v.data(), kNumel);
    write("m_scales", "uint8", m_scales.data(), kBlocks);
    write("v_scales", "uint8", v_scales.data(), kBlocks);
    write("means", "float32", s.means.data(), kBlocks);
    write("published", kTypes[published_type], s.published.data(), kNumel);
}

void mean(int32_t grad_type, int32_t published_type, int32_t threads) {
    State s(grad_type, published_type);
    const float scales[kSteps] = {0.5f, 0.25f, 0.125f};
    std::vector<int32_t> updates(kBlocks);
    for (int64_t b = 0; b < kBlocks; ++b) updates[b] = b % 3 == 0 ? -1 : static_cast<int32_t>(b * b);
    const MeanPass pass{s.p.data(), s.m.data(), s.v.data(), s.addresses.data(), scales, updates.data(),
                        s.published.data(), kNumel, kBlock, 0.9, 0.95, 1e-3,
                        {0.1f, 0.95f, 0.05f, 1e-8f, 0.9999f, 0.0f, 0.0f, 0.0f, 0.0f},
                        kSteps, grad_type, published_type, threads};
    dsext_mean_pass(&pass);
    s.write_all();
}

}  // namespace

int main(int count, char **) {  // an argument: also with moments of 8 bits
    for (int32_t threads : {1, 2})
        for (int32_t g = 0; g < 3; ++g)
            for (int32_t y = 0; y < 3; ++y) {
                adam(g, y, true, threads);
                adam(g, y, false, threads);
                mean(g, y, threads);
                if (count > 1) adam_of_codes(g, y, threads);
            }
}
