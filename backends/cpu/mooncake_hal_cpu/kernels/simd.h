// Operations on a register of floats, with the vector extensions that GCC and Clang share: one
// source serves AVX-512, AVX2, SSE and NEON. Elements in memory are float or bf16; arithmetic is in
// float. A vector is never wider than a register: GCC keeps wider ones in memory, which delays each
// sum.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>
#if defined(__AVX__)
#include <immintrin.h>
#endif

struct bf16 { uint16_t bits; };

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif
typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

static inline vf splat(float x) { return x - vf{}; }  // not +, which would turn -0 into 0

static inline vf load(const float* p) {
  vf x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

static inline vf load(const bf16* p) {
#if defined(__AVX512F__)  // GCC 12 would widen in two halves
  const __m256i raw = _mm256_loadu_si256((const __m256i*)p);
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16);
#elif defined(__AVX2__)
  const __m128i raw = _mm_loadu_si128((const __m128i*)p);
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16);
#else
  vh raw;
  std::memcpy(&raw, p, sizeof raw);
  return (vf)(__builtin_convertvector(raw, vu) << 16);
#endif
}

static inline void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }

static inline void store(bf16* p, vf x) {  // round to nearest even, as torch does; NaN stays NaN
#if defined(__AVX512BF16__)
  const __m256bh out = _mm512_cvtneps_pbh((__m512)x);
#else
  const vu bits = (vu)x;
  const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const vh out = __builtin_convertvector(x == x ? rounded : vu{} + 0x7fc0u, vh);
#endif
  std::memcpy(p, &out, sizeof out);
}

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

static inline void narrow(float* p, float x) { *p = x; }
static inline void narrow(bf16* p, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  p->bits = x == x ? (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16) : 0x7fc0;
}

#if defined(__AVX512F__)
static inline float sum(vf x) { return _mm512_reduce_add_ps((__m512)x); }
static inline float largest(vf x) { return _mm512_reduce_max_ps((__m512)x); }
#else
static inline float sum(vf x) {  // by halves, so that the order does not depend on the compiler
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) x[i] += x[i + half];
  return x[0];
}

static inline float largest(vf x) {
  float out = x[0];
  for (int i = 1; i < LANES; i++) out = std::max(out, x[i]);
  return out;
}
#endif

static inline vf vmax(vf a, vf b) { return a > b ? a : b; }

// exp with an error of a few units in the last place; 0 below -87, clamped above 88
static inline vf vexp(vf x) {
  const vf clamped = x > 88.f ? splat(88.f) : (x > -87.f ? x : splat(-87.f));
  const vf shifted = clamped * 1.44269504f + 12582912.f;  // 1.5 * 2^23: rounds to an integer
  const vf n = shifted - 12582912.f;
  const vf r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  const vf scale = (vf)((__builtin_convertvector(n, vi) + 127) << 23);
  return x > -87.f ? p * scale : vf{};
}
