// Decode attention over paged, strided KV: one query token per sequence, grouped query heads.
//
// It reaches memory bandwidth only if rows are read in the order of their addresses, and prefetched
// shortly before: blocks are scattered in memory, so that the hardware prefetcher can't predict
// them. A part therefore processes all heads of a token together, a few tokens at a time, and reads
// its keys once and then its values once.

constexpr int ROW_BYTES = 4096;  // of one token's heads in a part; more heads are divided
constexpr int MOST_AHEAD = 64;   // tokens to prefetch ahead
// Cache level to prefetch into: 3 is L1, 2 is L2. L2 is twice as fast on Zen 2, which fills few
// lines at once.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int INTO = 2;
#else
constexpr int INTO = 3;
#endif

// The rows of CHUNK tokens and some heads, as pieces of one head each, in the order of their
// addresses. For each piece it has the piece further ahead to prefetch meanwhile.
template <int CHUNK, int BYTES>
struct Pieces {
  static constexpr int AHEAD_BYTES = CHUNK == TOGETHER ? 8192 : 12288;  // a quarter of L1 or less
  int count, bytes;
  std::vector<int> tokens;
  std::vector<int64_t> offsets;

  Pieces(const Cache& cache, int heads, int bytes) : count(CHUNK * heads), bytes(bytes) {
    const int ahead = std::min(AHEAD_BYTES / bytes, MOST_AHEAD * heads);
    for (int i = ahead; i < ahead + count; i++) {
      const int chunk = i / count, at = i % count;
      tokens.push_back(chunk * CHUNK + (CHUNK == TOGETHER ? at % CHUNK : at / heads));
      offsets.push_back((CHUNK == TOGETHER ? at / CHUNK : at % heads) * cache.head_stride);
    }
  }

  // Inlined, since GCC removes calls of a function that only prefetches.
  __attribute__((always_inline)) void ask(const char* const* rows, int first, int last) const {
    for (int i = first; i < std::min(last, count); i++)
#pragma GCC unroll 8
      for (int byte = 0; byte < (BYTES ? BYTES : bytes); byte += 64)
        __builtin_prefetch(rows[tokens[i]] + offsets[i] + byte, 0, INTO);
  }
};

// One part's attention. DIM: head_dim, or 0 for any. CHUNK: number of tokens that are processed
// together, head by head: few if a token's heads are adjacent, 16 if a head's tokens are.
template <typename T, int DIM, int CHUNK>
struct Attention {
  using Weight = typename Item<T>::Weight;

  const Batch& d;
  const Part& part;
  const int group = d.heads / d.kv_heads, dim = DIM ? DIM : d.head_dim;
  const Pieces<CHUNK, DIM * (int)sizeof(T)> keys{d.key, part.heads, dim * (int)sizeof(T)};
  const Pieces<CHUNK, DIM * (int)sizeof(T)> values{d.value, part.heads, dim * (int)sizeof(T)};
  const std::unique_ptr<float[]> scores{new float[(size_t)part.heads * group * SCORES]};
  const char* key_rows[2 * PART + MOST_AHEAD + CHUNK];  // followed by the values' rows
  const char** const value_rows = key_rows + padded(part.count);

  Attention(const Batch& d, const Part& part) : d(d), part(part) {
    locate_padded(d, d.key, part, key_rows);
    locate_padded(d, d.value, part, value_rows);
    std::fill_n(value_rows + padded(part.count), MOST_AHEAD + CHUNK, value_rows[0]);
  }

  // SHARED: the four heads of a quad have the same KV head.
  template <bool SHARED>
  void score(const T* query) {
    query += part.sequence * d.query_stride + part.first_head * group * d.query_head_stride;
    const auto quads = quads_of(query, d.query_head_stride, part.heads * group, group,
                                d.key.head_stride, scores.get());
    const int steps = (int)quads.size() * CHUNK / QUAD;
    const int pieces = (keys.count + steps - 1) / steps;
    for (int t = 0; t < part.count; t += CHUNK) {
      int asked = 0;
      for (const auto& quad : quads)
        for (int token = t; token < std::min(t + CHUNK, part.count); token += QUAD) {
          vf sums[QUAD * QUAD] = {};
          add_products<T, DIM, SHARED>(quad, key_rows + token, 0, dim, sums);
          keys.ask(key_rows + t, asked, asked + pieces);
          asked += pieces;
          put_scores(quad, token, sums, d.scale);
        }
    }
  }

  float* scores_of(int head) { return &scores[(size_t)head * group * SCORES]; }

  void add_values(float* out) {
    const size_t size = partial_floats(d);
    for (int t = 0; t < part.count; t += CHUNK)
      for (int h = 0; h < part.heads; h++) {
        const auto ask = [&](int first, int last) __attribute__((always_inline)) {
          values.ask(value_rows + t, h * CHUNK + first, h * CHUNK + last);
        };
        accumulate_group<T, CHUNK>(value_rows + t, h * d.value.head_stride, scores_of(h), t, group,
                                   dim, out + h * size + 2 * group, ask);
      }
  }

  void run(const T* query, float* out) {
    if (group % QUAD == 0) score<true>(query);
    else score<false>(query);
    const size_t size = partial_floats(d);
    for (int h = 0; h < part.heads; h++)
      weigh<T>(scores_of(h), part.count, group, dim, out + h * size);
    add_values(out);
    for (int h = 0; h < part.heads; h++)
      for (int g = 0; g < group; g++)
        put_in_order(out + h * size + 2 * group + g * dim, dim, Weight{});
  }
};

template <typename T, int DIM>
static void attend(const Batch& d, const Part& part, const T* query, float* out) {
  const bool tokens_together = d.key.token_stride < d.key.head_stride;
  if (tokens_together) Attention<T, DIM, TOGETHER>(d, part).run(query, out);
  else Attention<T, DIM, QUAD>(d, part).run(query, out);
}

template <typename T>
static void decode(const Batch& d, const T* query, T* out, int threads) {
  threads = worthwhile(d, threads);
  const int heads = heads_per_part(d, ROW_BYTES / (d.head_dim * (int)sizeof(T)), threads);
  decode_with(d, heads, out, threads, [&](const Part& part, float* partial) {
    switch (d.head_dim) {
      case 64: return attend<T, 64>(d, part, query, partial);
      case 128: return attend<T, 128>(d, part, query, partial);
      default: return attend<T, 0>(d, part, query, partial);
    }
  });
}

// `out` is dense.
extern "C" void decode_attention(void* out, const void* query, const void* key, const void* value,
                                 const int32_t* tables, const int32_t* contexts,
                                 const int64_t* strides, const int64_t* shape, float scale,
                                 int is_bf16, int threads) {
  const Batch d = make_batch(key, value, tables, contexts, strides, shape, scale);
  if (is_bf16) decode(d, (const bf16*)query, (bf16*)out, threads);
  else decode(d, (const float*)query, (float*)out, threads);
}
