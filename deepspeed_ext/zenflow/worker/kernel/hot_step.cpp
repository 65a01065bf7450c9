// Takes an Adam step of whole blocks on a CPU that is the accelerator, in one pass (formulas: kernels/definition.py).
// Results equal those of torch's operations bitwise.

#include "not_fused.h"
#include "passes.h"

extern "C" {

struct HotStep {
    float *p, *m, *v;
    const void *grad;
    const float *correction1, *correction2_root;  // per block
    int64_t numel, block_size;
    int32_t grad_dtype, threads;
    float grad_scale, lr, beta1, weight1, beta2, weight2, eps, l2, decay;
};
}

namespace {

template <Dtype G>
INLINE void step(const HotStep &s, int64_t first, int64_t last) {
    float *__restrict p = s.p, *__restrict m = s.m, *__restrict v = s.v;
    const auto *__restrict grad = static_cast<const typename Element<G>::type *>(s.grad);
    const float scale = s.grad_scale, beta1 = s.beta1, weight1 = s.weight1, beta2 = s.beta2, weight2 = s.weight2;
    const float less_lr = -s.lr, eps = s.eps, l2 = s.l2, decay = s.decay;
    for (int64_t begin = first; begin < last; begin += s.block_size) {
        const int64_t block = begin / s.block_size, end = begin + s.block_size < last ? begin + s.block_size : last;
        const float correction1 = s.correction1[block], correction2_root = s.correction2_root[block];
        for (int64_t i = begin; i < end; ++i) {
            float g = Element<G>::load(grad[i]) * scale;
            if (l2 != 0.0f) g += p[i] * l2;
            const float mean = m[i] * beta1 + g * weight1, square = v[i] * beta2 + (g * weight2) * g;
            m[i] = mean;
            v[i] = square;
            const float denominator = std::sqrt(square) / correction2_root + eps;
            p[i] = p[i] * decay + mean / correction1 * less_lr / denominator;
        }
    }
}

CLONES void step_32(const HotStep &s, int64_t first, int64_t last) { step<kFloat32>(s, first, last); }
CLONES void step_bf(const HotStep &s, int64_t first, int64_t last) { step<kBFloat16>(s, first, last); }
CLONES void step_fp(const HotStep &s, int64_t first, int64_t last) { step<kFloat16>(s, first, last); }

// Indexed by the dtype of gradients.
void (*const kSteps[])(const HotStep &, int64_t, int64_t) = {step_32, step_bf, step_fp};

}  // namespace

extern "C" void dsext_hot_step(const HotStep *s) {
    for_each_tile(s->numel, s->block_size, s->threads,
                  [&](int64_t first, int64_t last) { kSteps[s->grad_dtype](*s, first, last); });
}
