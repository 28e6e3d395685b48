// AVX-512 for processors with AVX2: the intrinsics that the CPU kernels call, element by element.
//
// Included before the kernels' source, it lets a machine without AVX-512 test that code. GCC has the
// types on every x86; only its intrinsics require the instructions.
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#define __AVX512F__ 1

namespace emulated {

template <typename E, typename V> struct Elements {
  E at[sizeof(V) / sizeof(E)];
  explicit Elements(const V& v) { std::memcpy(at, &v, sizeof v); }
  V vector() const {
    V v;
    std::memcpy(&v, at, sizeof v);
    return v;
  }
};
template <typename E, typename V> static Elements<E, V> elements(const V& v) {
  return Elements<E, V>(v);
}

static inline __m512i loadu(const void* p) {
  __m512i v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
static inline void storeu(void* p, __m512i v) { std::memcpy(p, &v, sizeof v); }

static inline __m512i set1(int32_t x) {
  auto out = elements<int32_t>(__m512i{});
  for (auto& each : out.at) each = x;
  return out.vector();
}
static inline __m512i set64(int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f,
                            int64_t g, int64_t h) {
  return __m512i{a, b, c, d, e, f, g, h};
}
static inline __m512i widen16(__m256i x) {
  const auto in = elements<uint16_t>(x);
  auto out = elements<uint32_t>(__m512i{});
  for (int i = 0; i < 16; i++) out.at[i] = in.at[i];
  return out.vector();
}
static inline __m512i extend(__m256i x) {
  __m512i out{};
  std::memcpy(&out, &x, sizeof x);
  return out;
}
static inline __m512i shift_left(__m512i x, int bits) {
  auto out = elements<uint32_t>(x);
  for (auto& each : out.at) each <<= bits;
  return out.vector();
}

template <typename E, typename V> static V permute(V x, __m512i index, V y) {
  constexpr int count = sizeof(V) / sizeof(E);
  const auto low = elements<E>(x), high = elements<E>(y);
  using Index = typename std::conditional<sizeof(E) == 8, int64_t, int32_t>::type;
  const auto at = elements<Index>(index);
  auto out = low;
  for (int i = 0; i < count; i++) {
    const int from = at.at[i] & (2 * count - 1);
    out.at[i] = from < count ? low.at[from] : high.at[from - count];
  }
  return out.vector();
}
// Interleaves the lower or the upper half of every 128 bits.
template <typename E> static __m512i unpack(__m512i x, __m512i y, int upper) {
  constexpr int count = 16 / sizeof(E);
  const auto first = elements<E>(x), second = elements<E>(y);
  auto out = first;
  for (int lane = 0; lane < 4 * count; lane += count)
    for (int i = 0; i < count / 2; i++) {
      out.at[lane + 2 * i] = first.at[lane + upper * count / 2 + i];
      out.at[lane + 2 * i + 1] = second.at[lane + upper * count / 2 + i];
    }
  return out.vector();
}
static inline __m512i shuffle_lanes(__m512i x, __m512i y, int which) {
  const auto first = elements<__m128i>(x), second = elements<__m128i>(y);
  auto out = first;
  for (int i = 0; i < 4; i++) out.at[i] = (i < 2 ? first : second).at[which >> 2 * i & 3];
  return out.vector();
}

static inline float add_all(__m512 x) {
  auto in = elements<float>(x);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) in.at[i] += in.at[i + half];
  return in.at[0];
}
static inline float max_all(__m512 x) {
  const auto in = elements<float>(x);
  float out = in.at[0];
  for (float each : in.at) out = each > out ? each : out;
  return out;
}

static inline float widen_bf16(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
static inline __m512 dot_pairs(__m512 sum, __m512bh x, __m512bh y) {
  const auto first = elements<uint16_t>(x), second = elements<uint16_t>(y);
  auto out = elements<float>(sum);
  for (int i = 0; i < 16; i++)
    for (int odd = 1; odd >= 0; odd--)
      out.at[i] += widen_bf16(first.at[2 * i + odd]) * widen_bf16(second.at[2 * i + odd]);
  return out.vector();
}
static inline __m256bh round_bf16(__m512 x) {  // to nearest even; NaN stays NaN
  const auto in = elements<uint32_t>(x);
  auto out = elements<uint16_t>(__m256bh{});
  for (int i = 0; i < 16; i++) {
    const uint32_t bits = in.at[i];
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    out.at[i] = is_nan ? 0x7fc0 : (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
  return out.vector();
}

}  // namespace emulated

#define _mm512_loadu_si512 emulated::loadu
#define _mm512_load_si512 emulated::loadu
#define _mm512_storeu_si512 emulated::storeu
#define _mm512_set1_epi32 emulated::set1
#define _mm512_setr_epi64 emulated::set64
#define _mm512_cvtepu16_epi32 emulated::widen16
#define _mm512_zextsi256_si512 emulated::extend
#define _mm512_slli_epi32(x, bits) emulated::shift_left(x, bits)
#define _mm512_or_si512(x, y) ((__m512i)((x) | (y)))
#define _mm512_permutex2var_ps emulated::permute<float, __m512>
#define _mm512_permutex2var_epi64 emulated::permute<int64_t, __m512i>
#define _mm512_unpacklo_epi16(x, y) emulated::unpack<int16_t>(x, y, 0)
#define _mm512_unpackhi_epi16(x, y) emulated::unpack<int16_t>(x, y, 1)
#define _mm512_unpacklo_epi32(x, y) emulated::unpack<int32_t>(x, y, 0)
#define _mm512_unpackhi_epi32(x, y) emulated::unpack<int32_t>(x, y, 1)
#define _mm512_unpacklo_epi64(x, y) emulated::unpack<int64_t>(x, y, 0)
#define _mm512_unpackhi_epi64(x, y) emulated::unpack<int64_t>(x, y, 1)
#define _mm512_shuffle_i32x4(x, y, which) emulated::shuffle_lanes(x, y, which)
#define _mm512_reduce_add_ps emulated::add_all
#define _mm512_reduce_max_ps emulated::max_all
#define _mm512_dpbf16_ps emulated::dot_pairs
#define _mm512_cvtneps_pbh emulated::round_bf16
