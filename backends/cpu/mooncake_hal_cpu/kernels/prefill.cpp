// Causal attention of many query tokens over paged KV, in tiles, as two small matrix products.
//
// Keys and values of a sequence are packed once: keys are transposed, and both are packed in pairs
// if the processor multiplies pairs of bf16. Tiles of keys start at token 0 of the context, and
// query rows are independent, so that a prompt gives the same result whole, in chunks, or after a
// cached prefix.

constexpr int KEYS = 64;  // tokens per packed tile
constexpr int ROWS = 6, WIDTH = REGISTERS / 8;  // sums take 3/4 of the registers
constexpr int QUERY_ROWS = 48;  // rows (token, head of the group) that share a pass over the keys

// The operands of the products: floats, or pairs of bf16 that one instruction multiplies and adds.
struct Pair { uint32_t bits; };
template <typename T> struct Packing { using Item = float; static constexpr int STEP = 1; };
#if defined(__AVX512BF16__)
template <> struct Packing<bf16> { using Item = Pair; static constexpr int STEP = 2; };

static inline vf multiply_add(vf sum, const Pair* b, Pair a) {
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(b),
                              (__m512bh)_mm512_set1_epi32((int)a.bits));
}
#endif
static inline vf multiply_add(vf sum, const float* b, float a) { return sum + load(b) * a; }

// out[r][w] = or += sum over k of a[r][k] × b[k][w]
template <int VECTORS, bool ADD, typename Item>
static void product(const Item* a, int64_t a_stride, const Item* b, int64_t b_stride, int depth,
                    float* out, int64_t out_stride) {
  vf sums[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++)
    for (int w = 0; w < VECTORS; w++)
      sums[r][w] = ADD ? load(out + r * out_stride + w * LANES) : vf{};
  for (int k = 0; k < depth; k++)
    for (int r = 0; r < ROWS; r++)
      for (int w = 0; w < VECTORS; w++)
        sums[r][w] = multiply_add(sums[r][w], b + k * b_stride + w * LANES, a[r * a_stride + k]);
  for (int r = 0; r < ROWS; r++)
    for (int w = 0; w < VECTORS; w++) store(out + r * out_stride + w * LANES, sums[r][w]);
}

template <bool ADD, typename Item>
static void product_wide(const Item* a, int64_t a_stride, const Item* b, int width, int depth,
                         float* out) {
  int at = 0;
  for (; at + WIDTH * LANES <= width; at += WIDTH * LANES)
    product<WIDTH, ADD>(a, a_stride, b + at, width, depth, out + at, width);
  for (; at < width; at += LANES)
    product<1, ADD>(a, a_stride, b + at, width, depth, out + at, width);
}

// Load items of a head's row of a token: a register of items from item `at` on, or one item.
template <typename T>
static inline vi items(const T* row, int at, const float*) { return (vi)load(row + at); }
static inline vi items(const bf16* row, int at, const Pair*) {
  vi x;
  std::memcpy(&x, row + 2 * at, sizeof x);
  return x;
}
template <typename T>
static inline void put_item(const T* row, int at, float* to) { *to = widen(row[at]); }
static inline void put_item(const bf16* row, int at, Pair* to) {
  std::memcpy(to, row + 2 * at, sizeof *to);
}

#if defined(__AVX512F__)
static inline void transpose(vi* tile) {
  __m512i pairs[LANES], fours[LANES];  // of rows, within each 128 bits
  for (int i = 0; i < LANES; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32((__m512i)tile[i], (__m512i)tile[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32((__m512i)tile[i], (__m512i)tile[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4)
    for (int half = 0; half < 2; half++) {
      fours[i + 2 * half] = _mm512_unpacklo_epi64(pairs[i + half], pairs[i + 2 + half]);
      fours[i + 2 * half + 1] = _mm512_unpackhi_epi64(pairs[i + half], pairs[i + 2 + half]);
    }
  for (int c = 0; c < 4; c++) {
    const __m512i even0 = _mm512_shuffle_i32x4(fours[c], fours[4 + c], 0x88);
    const __m512i even1 = _mm512_shuffle_i32x4(fours[8 + c], fours[12 + c], 0x88);
    const __m512i odd0 = _mm512_shuffle_i32x4(fours[c], fours[4 + c], 0xdd);
    const __m512i odd1 = _mm512_shuffle_i32x4(fours[8 + c], fours[12 + c], 0xdd);
    tile[c] = (vi)_mm512_shuffle_i32x4(even0, even1, 0x88);
    tile[4 + c] = (vi)_mm512_shuffle_i32x4(odd0, odd1, 0x88);
    tile[8 + c] = (vi)_mm512_shuffle_i32x4(even0, even1, 0xdd);
    tile[12 + c] = (vi)_mm512_shuffle_i32x4(odd0, odd1, 0xdd);
  }
}
#elif defined(__AVX2__)
static inline void transpose(vi* tile) {
  __m256 pairs[LANES], fours[LANES];  // of rows, within each 128 bits
  for (int i = 0; i < LANES; i += 2) {
    pairs[i] = _mm256_unpacklo_ps((__m256)tile[i], (__m256)tile[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps((__m256)tile[i], (__m256)tile[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4)
    for (int half = 0; half < 2; half++) {
      const __m256d low = (__m256d)pairs[i + half], high = (__m256d)pairs[i + 2 + half];
      fours[i + 2 * half] = (__m256)_mm256_unpacklo_pd(low, high);
      fours[i + 2 * half + 1] = (__m256)_mm256_unpackhi_pd(low, high);
    }
  for (int c = 0; c < 4; c++) {
    tile[c] = (vi)_mm256_permute2f128_ps(fours[c], fours[4 + c], 0x20);
    tile[4 + c] = (vi)_mm256_permute2f128_ps(fours[c], fours[4 + c], 0x31);
  }
}
#endif

// keys: [head_dim / STEP][KEYS]; missing tokens are zeros. Each chunk packs its whole context in
// every layer, which for short chunks is most of the work.
template <typename T, typename Item>
static void pack_keys(const T* const* rows, int count, int dim, Item* out) {
  const int width = dim / Packing<T>::STEP;
  int d = 0;
#if defined(__AVX2__)
  for (; d + LANES <= width; d += LANES)
    for (int t = 0; t < KEYS; t += LANES) {
      vi tile[LANES];
      for (int i = 0; i < LANES; i++) tile[i] = t + i < count ? items(rows[t + i], d, out) : vi{};
      transpose(tile);
      for (int i = 0; i < LANES; i++) std::memcpy(out + (d + i) * KEYS + t, &tile[i], sizeof(vi));
    }
#endif
  for (; d < width; d++)
    for (int t = 0; t < KEYS; t++) {
      Item* to = out + d * KEYS + t;
      *to = Item{};
      if (t < count) put_item(rows[t], d, to);
    }
}

// values: [KEYS / STEP][head_dim]
template <typename T>
static void pack_values(const T* const* rows, int count, int dim, float* out) {
  for (int t = 0; t < KEYS; t++)
    for (int d = 0; d < dim; d += LANES)
      store(out + t * dim + d, t < count ? load(rows[t] + d) : vf{});
}

static inline void pack_values(const bf16* const* rows, int count, int dim, Pair* out) {
  for (int t = 0; t < KEYS; t += 2)
    for (int d = 0; d < dim; d += LANES) {
      const vu low = t < count ? (vu)load(rows[t] + d) : vu{};
      const vu high = t + 1 < count ? (vu)load(rows[t + 1] + d) : vu{};
      const vu both = low >> 16 | high;
      std::memcpy(out + t / 2 * dim + d, &both, sizeof both);
    }
}

static inline void put_weight(float* row, int at, vf x) { store(row + at, x); }
static inline void put_weight(Pair* row, int at, vf x) { store((bf16*)row + at, x); }

static inline void put_query(float* row, const float* query, int dim) {
  std::memcpy(row, query, dim * sizeof(float));
}
static inline void put_query(float* row, const bf16* query, int dim) {
  for (int i = 0; i < dim; i += LANES) store(row + i, load(query + i));
}
static inline void put_query(Pair* row, const bf16* query, int dim) {
  std::memcpy(row, query, dim * sizeof(bf16));
}

// Turn one row's scores of a tile, of which it sees the first `visible`, into weights, and update
// the row's online softmax; see soften in weighing.h.
template <typename Item>
static void weigh(float* scores, int visible, float scale, int dim, float* maximum, float* total,
                  float* sums, Item* weights) {
  vi lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  vf tile[KEYS / LANES], high = splat(-INFINITY);
  for (int i = 0; i < KEYS / LANES; i++) {
    const vf score = load(scores + i * LANES) * scale;
    tile[i] = lane + i * LANES < visible ? score : splat(-INFINITY);
    high = vmax(high, tile[i]);
  }
  const float before = *maximum, now = visible > 0 ? std::max(before, largest(high)) : before;
  vf added{};
  for (int i = 0; i < KEYS / LANES; i++) {
    const vf weight = visible > 0 ? vexp(tile[i] - now) : vf{};
    put_weight(weights, i * LANES, weight);
    added += weight;
  }
  const float keep = before == now ? 1.f : vexp(splat(before - now))[0];
  *total = *total * keep + sum(added);
  *maximum = now;
  if (keep != 1.f)
    for (int i = 0; i < dim; i += LANES) store(sums + i, load(sums + i) * keep);
}

struct Free {
  void operator()(void* p) const { ::operator delete(p, std::align_val_t(64)); }
};
using Memory = std::unique_ptr<void, Free>;

static Memory allocate(size_t bytes) {
  return Memory{::operator new(bytes, std::align_val_t(64))};
}

constexpr size_t MOST_KEPT = 64 << 20;  // bytes

// Memory for packed keys and values. Touching fresh pages costs several times as much as packing,
// and every layer of every step packs the context. A thread therefore keeps its memory, except for
// very long contexts.
struct Scratch {
  Memory own;
  void* data;

  explicit Scratch(size_t bytes) {
    static thread_local Memory kept;
    static thread_local size_t size = 0;
    if (bytes > MOST_KEPT) own = allocate(bytes);
    else if (bytes > size) {
      kept.reset();
      size = 0;
      kept = allocate(std::min(MOST_KEPT, 2 * bytes));
      size = std::min(MOST_KEPT, 2 * bytes);
    }
    data = own ? own.get() : kept.get();
  }
};

// One sequence's prefill.
template <typename T>
struct Prefill {
  using Item = typename Packing<T>::Item;
  static constexpr int STEP = Packing<T>::STEP;

  const Batch& d;
  const T* query;
  T* out;
  int sequence, tokens;
  const int context = d.contexts[sequence], group = d.heads / d.kv_heads, dim = d.head_dim;
  const int tiles = (context + KEYS - 1) / KEYS;
  const int query_tiles = (tokens * group + QUERY_ROWS - 1) / QUERY_ROWS;
  const size_t tile_items = (size_t)KEYS * dim / STEP;
  const size_t items_of_all = tile_items * tiles * d.kv_heads;
  const Scratch scratch{2 * items_of_all * sizeof(Item)};
  Item* const keys = (Item*)scratch.data;
  Item* const values = keys + items_of_all;

  void pack_tile(int head, int tile) {
    const char* rows[KEYS];
    const int first = tile * KEYS, count = std::min(KEYS, context - first);
    const size_t at = ((size_t)head * tiles + tile) * tile_items;
    locate(d, d.key, sequence, head, first, count, rows);
    pack_keys((const T**)rows, count, dim, keys + at);
    locate(d, d.value, sequence, head, first, count, rows);
    pack_values((const T**)rows, count, dim, values + at);
  }

  // number of the context's tokens that a row sees
  int limit(int row) const { return context - tokens + std::min(row / group, tokens - 1) + 1; }

  void attend_rows(int head, int query_tile) const {
    const int first = query_tile * QUERY_ROWS, last = std::min(first + QUERY_ROWS, tokens * group);
    const int depth = dim / STEP;
    std::vector<Item> queries((size_t)QUERY_ROWS * depth), weights(ROWS * KEYS / STEP);
    std::vector<float> scores(ROWS * KEYS), sums((size_t)QUERY_ROWS * dim);
    std::vector<float> maxima(QUERY_ROWS, -INFINITY), totals(QUERY_ROWS);
    for (int row = first; row < last; row++)
      put_query(&queries[(size_t)(row - first) * depth],
                query + row / group * d.query_stride +
                    (head * group + row % group) * d.query_head_stride,
                dim);
    for (int tile = 0; tile * KEYS < limit(last - 1); tile++) {
      const size_t at = ((size_t)head * tiles + tile) * tile_items;
      for (int r = 0; r < last - first; r += ROWS) {
        product_wide<false>(&queries[(size_t)r * depth], depth, keys + at, KEYS, depth,
                            scores.data());
        for (int i = r; i < r + ROWS; i++)
          weigh(&scores[(i - r) * KEYS], limit(first + i) - tile * KEYS, d.scale, dim, &maxima[i],
                &totals[i], &sums[(size_t)i * dim], &weights[(i - r) * KEYS / STEP]);
        product_wide<true>(weights.data(), KEYS / STEP, values + at, dim, KEYS / STEP,
                           &sums[(size_t)r * dim]);
      }
    }
    for (int row = first; row < last; row++) {
      T* to = out + ((int64_t)(row / group) * d.heads + head * group + row % group) * dim;
      for (int i = 0; i < dim; i += LANES)
        store(to + i, load(&sums[(size_t)(row - first) * dim + i]) / totals[row - first]);
    }
  }

  // The number of threads to use: one for little work, which is packing the context, and
  // multiplying the rows with it.
  int worthwhile(int threads) const {
    const int64_t rows = d.kv_heads + (int64_t)tokens * d.heads / 4;
    return context * rows * dim < PARALLEL_ELEMENTS ? 1 : threads;
  }

  void run(int threads) {
    threads = worthwhile(threads);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for collapse(2) schedule(static)
      for (int head = 0; head < d.kv_heads; head++)
        for (int tile = 0; tile < tiles; tile++) pack_tile(head, tile);
      // the last rows see the most tokens and go first, so that no long tile runs alone at the end
#pragma omp for collapse(2) schedule(dynamic)
      for (int tile = query_tiles - 1; tile >= 0; tile--)
        for (int head = 0; head < d.kv_heads; head++) attend_rows(head, tile);
    }
  }
};

template <typename T>
static void prefill(const Batch& d, const T* query, const int32_t* starts, T* out, int threads) {
  for (int s = 0; s < d.sequences; s++) {
    const int64_t first = starts[s] - starts[0];
    Prefill<T>{d, query + first * d.query_stride, out + first * d.heads * d.head_dim, s,
               starts[s + 1] - starts[s]}
        .run(threads);
  }
}

// `starts`: offset of each sequence's first token, and of the end of the last one. `out` is dense.
extern "C" void prefill_attention(void* out, const void* query, const void* key, const void* value,
                                  const int32_t* tables, const int32_t* contexts,
                                  const int32_t* starts, const int64_t* strides,
                                  const int64_t* shape, float scale, int is_bf16, int threads) {
  const Batch d = make_batch(key, value, tables, contexts, strides, shape, scale);
  if (is_bf16) prefill(d, (const bf16*)query, starts, (bf16*)out, threads);
  else prefill(d, (const float*)query, starts, (float*)out, threads);
}
