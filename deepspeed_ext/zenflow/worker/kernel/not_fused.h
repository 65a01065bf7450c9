// Included first: every product and sum is rounded on its own, as torch's operations do. A fused multiply-add would
// round once.

#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#else
#pragma STDC FP_CONTRACT OFF
#endif
