// The steps of a decode on the rows of one part of a sequence: scores, weights, weighted sums.
//
// bf16 is multiplied in pairs if the processor can; weights are then bf16 too, as in prefills.

constexpr int PART = 256;      // tokens per part
constexpr int QUAD = 4;        // heads, and tokens, whose scores are computed at once: 16 sums
constexpr int TOGETHER = 16;  // tokens whose values are added at once, if a head's are adjacent
// Floats between the scores of two heads; a power of two would map them to few sets of L1.
constexpr int SCORES = PART + TOGETHER;

template <typename T> struct Item {
  using Chunk = vf;      // operand of one multiply-add instruction
  using Weight = float;
  static constexpr int SIZE = LANES;  // elements of a chunk
};
#if defined(__AVX512BF16__)
struct Pairs { __m512i bits; };
template <> struct Item<bf16> {
  using Chunk = Pairs;
  using Weight = bf16;
  static constexpr int SIZE = 2 * LANES;
};

static inline vf multiply_add(vf sum, Pairs a, Pairs b) {
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a.bits, (__m512bh)b.bits);
}
static inline void get(Pairs& out, const bf16* p) { out.bits = _mm512_loadu_si512(p); }
static inline void get_half(Pairs& out, const bf16* p) {
  out.bits = _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)p));
}
#endif
static inline vf multiply_add(vf sum, vf a, vf b) { return sum + a * b; }
template <typename T>
static inline void get(vf& out, const T* p) { out = load(p); }
template <typename T>
static inline void get_half(vf&, const T*) {}  // heads are whole chunks

#if defined(__AVX512F__)
// Lane l of the result is the sum of rows[l]: a tree of half-width folds, all rows at once.
template <int K>
static inline vf fold(vf a, vf b) {
  alignas(64) static const struct Indices {
    int32_t low[LANES], high[LANES];
    constexpr Indices() : low{}, high{} {
      for (int i = 0; i < LANES; i++) {
        low[i] = (i & K) ? LANES + i - K : i;
        high[i] = (i & K) ? LANES + i : i + K;
      }
    }
  } indices;
  const __m512 x = (__m512)a, y = (__m512)b;
  return (vf)_mm512_permutex2var_ps(x, _mm512_load_si512(indices.low), y) +
         (vf)_mm512_permutex2var_ps(x, _mm512_load_si512(indices.high), y);
}

static inline vf sum_rows(vf* rows) {
  for (int i = 0; i < 8; i++) rows[i] = fold<1>(rows[2 * i], rows[2 * i + 1]);
  for (int i = 0; i < 4; i++) rows[i] = fold<2>(rows[2 * i], rows[2 * i + 1]);
  for (int i = 0; i < 2; i++) rows[i] = fold<4>(rows[2 * i], rows[2 * i + 1]);
  return fold<8>(rows[0], rows[1]);
}
#elif defined(__AVX2__)
static inline vf sum_rows(const vf* rows) {
  __m256 fours[2];  // lane l: half of the sum of rows l % 4, of four rows
  for (int i = 0; i < 2; i++) {
    const vf* row = rows + 4 * i;
    fours[i] = _mm256_hadd_ps(_mm256_hadd_ps((__m256)row[0], (__m256)row[1]),
                              _mm256_hadd_ps((__m256)row[2], (__m256)row[3]));
  }
  return (vf)_mm256_permute2f128_ps(fours[0], fours[1], 0x20) +
         (vf)_mm256_permute2f128_ps(fours[0], fours[1], 0x31);
}
#else
static inline vf sum_rows(const vf* rows) {
  vf out;
  for (int i = 0; i < LANES; i++) out[i] = sum(rows[i]);
  return out;
}
#endif

// Four heads, of the same KV head or not: addresses of their queries and scores, and offsets of
// their KV in a token's row. The last quad of a part may contain a head more than once, which is
// then computed repeatedly, with the same result.
template <typename T>
struct Quad {
  const T* queries[QUAD];
  int64_t offsets[QUAD];
  float* scores[QUAD];
};

// The quads of `heads` heads, whose scores are at `scores`, SCORES floats per head.
// group: heads per KV head; kv_stride: bytes from one KV head to the next in a token's row.
template <typename T>
static std::vector<Quad<T>> quads_of(const T* queries, int64_t query_stride, int heads, int group,
                                     int64_t kv_stride, float* scores) {
  std::vector<Quad<T>> quads((heads + QUAD - 1) / QUAD);
  for (int i = 0; i < (int)quads.size() * QUAD; i++) {
    const int head = std::min(i, heads - 1);
    quads[i / QUAD].queries[i % QUAD] = queries + head * query_stride;
    quads[i / QUAD].offsets[i % QUAD] = head / group * kv_stride;
    quads[i / QUAD].scores[i % QUAD] = scores + (int64_t)head * SCORES;
  }
  return quads;
}

// sums[head * QUAD + token] += products of the tokens' rows with the queries from element `from`
// on, not yet summed over the lanes. SHARED: all four heads have the same KV head. As many heads
// are processed together as registers can hold sums for.
template <typename T, int DIM, bool SHARED>
static inline __attribute__((always_inline)) void add_products(
    const Quad<T>& quad, const char* const* rows, int from, int width, vf* sums) {
  using Chunk = typename Item<T>::Chunk;
  constexpr int HEADS = REGISTERS == 32 ? QUAD : QUAD / 2;
  const int dim = DIM ? DIM : width;
  const auto step = [&](int head, int i, auto&& read) __attribute__((always_inline)) {
    Chunk keys[QUAD], query;
    if (SHARED)
#pragma GCC unroll 4
      for (int t = 0; t < QUAD; t++) read(keys[t], (const T*)(rows[t] + quad.offsets[0]) + i);
#pragma GCC unroll 4
    for (int h = head; h < head + HEADS; h++) {
      read(query, quad.queries[h] + from + i);
#pragma GCC unroll 4
      for (int t = 0; t < QUAD; t++) {
        if (!SHARED) read(keys[t], (const T*)(rows[t] + quad.offsets[h]) + i);
        sums[h * QUAD + t] = multiply_add(sums[h * QUAD + t], keys[t], query);
      }
    }
  };
#pragma GCC unroll 2
  for (int head = 0; head < QUAD; head += HEADS) {
    int i = 0;
#pragma GCC unroll 4
    for (; i + Item<T>::SIZE <= dim; i += Item<T>::SIZE)
      step(head, i, [](Chunk& c, const T* p) __attribute__((always_inline)) { get(c, p); });
    if (i < dim)
      step(head, i, [](Chunk& c, const T* p) __attribute__((always_inline)) { get_half(c, p); });
  }
}

// Store the scores of a quad's heads and four tokens, from the sums of add_products.
template <typename T>
static inline void put_scores(const Quad<T>& quad, int token, vf* sums, float scale) {
  float scores[QUAD * QUAD];
  for (int i = 0; i < QUAD * QUAD; i += LANES) store(scores + i, sum_rows(sums + i) * scale);
  for (int h = 0; h < QUAD; h++)
    std::memcpy(quad.scores[h] + token, scores + h * QUAD, QUAD * sizeof(float));
}

// Turn one head's scores of `count` tokens into weights, in place. Weights from `count` up to the
// next multiple of TOGETHER are 0.
template <typename T>
static void soften(float* scores, int count, float* maximum, float* total) {
  const int padded = (count + TOGETHER - 1) / TOGETHER * TOGETHER;
  std::fill(scores + count, scores + padded, -INFINITY);
  vf high = load(scores);
  for (int t = LANES; t < padded; t += LANES) high = vmax(high, load(scores + t));
  *maximum = largest(high);
  vf sums{};
  for (int t = 0; t < padded; t += LANES) {
    const vf weight = vexp(load(scores + t) - *maximum);
    store((typename Item<T>::Weight*)scores + t, weight);
    sums += weight;
  }
  *total = sum(sums);
}

// Turn a part's scores for one KV head into weights, and initialise `out`: maxima, sums, and
// weighted sums of 0.
template <typename T>
static void weigh(float* scores, int count, int group, int dim, float* out) {
  for (int g = 0; g < group; g++)
    soften<T>(scores + (size_t)g * SCORES, count, out + g, out + group + g);
  std::fill_n(out + 2 * group, (size_t)group * dim, 0.f);
}

// Load WIDTH registers of values, of as many tokens as one instruction multiplies at once.
template <int WIDTH, typename T>
static inline void get_values(vf* out, const char* const* rows, int64_t offset) {
#pragma GCC unroll 8
  for (int w = 0; w < WIDTH; w++) out[w] = load((const T*)(rows[0] + offset) + w * LANES);
}
static inline vf get_weight(const float* weight) { return splat(*weight); }
static inline void put_in_order(float*, int, float) {}  // floats are in order already

#if defined(__AVX512BF16__)
// Load two tokens' values in pairs: of 32 elements, in an order that `put_in_order` undoes, or of
// the last 16.
template <int WIDTH, typename T>
static inline void get_values(Pairs* out, const char* const* rows, int64_t offset) {
  const T *one = (const T*)(rows[0] + offset), *two = (const T*)(rows[1] + offset);
  if (WIDTH == 1) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)one));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)two));
    out[0].bits = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    return;
  }
#pragma GCC unroll 4
  for (int w = 0; w + 1 < WIDTH; w += 2) {
    const __m512i x = _mm512_loadu_si512(one + w * LANES), y = _mm512_loadu_si512(two + w * LANES);
    out[w].bits = _mm512_unpacklo_epi16(x, y);
    out[w + 1].bits = _mm512_unpackhi_epi16(x, y);
  }
}
static inline Pairs get_weight(const bf16* weights) {
  int32_t both;
  std::memcpy(&both, weights, sizeof both);
  return {_mm512_set1_epi32(both)};
}
// Undo the order of unpacking, which interleaves the halves of every 128 bits: the sums of 32
// elements are in the order 0-3, 8-11, ...
static inline void put_in_order(float* sums, int dim, bf16) {
  for (int i = 0; i + 2 * LANES <= dim; i += 2 * LANES) {
    const __m512i low = _mm512_loadu_si512(sums + i), high = _mm512_loadu_si512(sums + i + LANES);
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    _mm512_storeu_si512(sums + i, _mm512_permutex2var_epi64(low, first, high));
    _mm512_storeu_si512(sums + i + LANES, _mm512_permutex2var_epi64(low, second, high));
  }
}
#endif

// sums[h] += weights[h] × values, over TOKENS tokens, for HEADS heads of one KV head and WIDTH
// registers of elements. `offset`: offset of these elements in a token's row, in bytes.
// `between(first, last)` is called for every range of tokens, to prefetch.
template <typename T, int TOKENS, int HEADS, int WIDTH, typename Between>
static inline void accumulate(const char* const* rows, int64_t offset,
                              const typename Item<T>::Weight* weights, int dim, float* sums,
                              const Between& between) {
  constexpr int STRIDE = SCORES * sizeof(float) / sizeof *weights;
  vf held[HEADS][WIDTH];
#pragma GCC unroll 4
  for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 8
    for (int w = 0; w < WIDTH; w++) held[h][w] = load(sums + h * dim + w * LANES);
#pragma GCC unroll 4
  for (int t = 0; t < TOKENS; t += Item<T>::SIZE / LANES) {
    typename Item<T>::Chunk values[WIDTH];
    between(t, t + Item<T>::SIZE / LANES);
    get_values<WIDTH, T>(values, rows + t, offset);
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++) {
      const auto weight = get_weight(weights + h * STRIDE + t);
#pragma GCC unroll 8
      for (int w = 0; w < WIDTH; w++) held[h][w] = multiply_add(held[h][w], values[w], weight);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 8
    for (int w = 0; w < WIDTH; w++) store(sums + h * dim + w * LANES, held[h][w]);
}

template <typename T, int TOKENS, int HEADS, typename Between>
static void accumulate_heads(const char* const* rows, int64_t offset,
                             const typename Item<T>::Weight* weights, int dim, float* sums,
                             const Between& between) {
  constexpr int WIDTH = (HEADS <= 2 ? 8 : 4) * REGISTERS / 32;  // half of the registers hold sums
  const auto nothing = [](int, int) {};
  int i = 0;
  if (i + WIDTH * LANES <= dim) {
    accumulate<T, TOKENS, HEADS, WIDTH>(rows, offset, weights, dim, sums, between);
    i += WIDTH * LANES;
  }
  for (; i + WIDTH * LANES <= dim; i += WIDTH * LANES)
    accumulate<T, TOKENS, HEADS, WIDTH>(rows, offset + i * sizeof(T), weights, dim, sums + i, nothing);
  for (; i + 2 * LANES <= dim; i += 2 * LANES)
    accumulate<T, TOKENS, HEADS, 2>(rows, offset + i * sizeof(T), weights, dim, sums + i, nothing);
  if (i < dim)
    accumulate<T, TOKENS, HEADS, 1>(rows, offset + i * sizeof(T), weights, dim, sums + i, nothing);
}

// accumulate for all heads of one KV head, whose weights `weigh` has stored in `scores`. `rows` are
// the rows of tokens from `token` on. Tokens beyond the end of the part have weight 0.
template <typename T, int TOKENS, typename Between>
static void accumulate_group(const char* const* rows, int64_t offset, const float* scores,
                             int token, int group, int dim, float* sums,
                             const Between& between) {
  const auto weights = [&](int head) {
    return (const typename Item<T>::Weight*)(scores + (size_t)head * SCORES) + token;
  };
  int h = 0;
  for (; h + 4 <= group; h += 4)
    accumulate_heads<T, TOKENS, 4>(rows, offset, weights(h), dim, sums + h * dim, between);
  sums += h * dim;
  switch (group - h) {
    case 3: return accumulate_heads<T, TOKENS, 3>(rows, offset, weights(h), dim, sums, between);
    case 2: return accumulate_heads<T, TOKENS, 2>(rows, offset, weights(h), dim, sums, between);
    case 1: return accumulate_heads<T, TOKENS, 1>(rows, offset, weights(h), dim, sums, between);
  }
}
