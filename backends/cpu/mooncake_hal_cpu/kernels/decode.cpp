// Decode attention over paged, strided KV; one query token per sequence, grouped query heads.
//
// A sequence is cut into parts of PART tokens from its first token on, whatever the batch, the
// thread count, the block size or the layout; parts are computed apart and merged in order. So the
// result depends on the sequence alone, and a lone long sequence still keeps every core busy.

constexpr int PART = 256;  // tokens per unit of work
constexpr int TILE = 32;   // tokens whose scores are held at once; their keys and values fit in L1

struct Cache {
  const char* base;
  int64_t block_stride, token_stride, head_stride;  // bytes
};

struct Batch {
  Cache key, value;
  const int32_t *tables, *contexts;
  int64_t table_stride;
  int sequences, heads, kv_heads, head_dim, block_size;
  int64_t query_stride, query_head_stride;  // elements
  float scale;
};

struct Part { int sequence, kv_head, first, count; };

// Bytes of one part's result: for each head of the group, maximum, sum and head_dim accumulators.
static inline size_t partial_floats(const Batch& d) {
  return (size_t)(d.heads / d.kv_heads) * (d.head_dim + 2);
}

// Addresses of `count` tokens of a sequence and KV head, from token `first` on.
template <typename T>
static void locate(const Batch& d, const Cache& cache, int sequence, int kv_head, int first,
                   int count, const T** rows) {
  const int32_t* table = d.tables + sequence * d.table_stride;
  const char* head = cache.base + kv_head * cache.head_stride;
  int block = first / d.block_size, offset = first % d.block_size;
  for (int t = 0; t < count; block++, offset = 0) {
    const int stop = std::min(count, t + d.block_size - offset);
    const char* row = head + table[block] * cache.block_stride + offset * cache.token_stride;
    for (; t < stop; t++, row += cache.token_stride) rows[t] = (const T*)row;
  }
}

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
#else
static inline vf sum_rows(vf* rows) {
  vf out;
  for (int i = 0; i < LANES; i++) out[i] = sum(rows[i]);
  return out;
}
#endif

// products of one key row with one query, not yet summed over the lanes
static inline vf dot(const float* key, const float* query, int dim) {
  vf out{};
  for (int i = 0; i < dim; i += LANES) out += load(key + i) * load(query + i);
  return out;
}

static inline vf dot(const bf16* key, const bf16* query, int dim) {
  vf out{};
  int i = 0;
#if defined(__AVX512BF16__)
  __m512 pairs = _mm512_setzero_ps();
  for (; i + 32 <= dim; i += 32)
    pairs = _mm512_dpbf16_ps(pairs, (__m512bh)_mm512_loadu_si512(key + i),
                             (__m512bh)_mm512_loadu_si512(query + i));
  out = (vf)pairs;
#endif
  for (; i < dim; i += LANES) out += load(key + i) * load(query + i);
  return out;
}

// scores of `count` tokens for one query head; those up to the next multiple of 16 are -inf
template <typename T, int DIM>
static void score(const T* const* keys, int count, const T* query, const Batch& d, float* out) {
  const int dim = DIM ? DIM : d.head_dim;
  for (int t = 0; t < count; t += LANES) {
    vf rows[LANES];
    const int last = count - 1;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) rows[i] = dot(keys[std::min(t + i, last)], query, dim);
    vf scores = sum_rows(rows) * d.scale;
    for (int i = count - t; i < LANES; i++) scores[i] = -INFINITY;
    store(out + t, scores);
  }
}

// out[g] += weights[g] × values, for GROUP heads and WIDTH × 16 elements held in registers
template <typename T, int GROUP, int WIDTH>
static void accumulate(const T* const* values, int count, const float* weights, int at, int dim,
                       float* out) {
  vf sums[GROUP][WIDTH];
  for (int g = 0; g < GROUP; g++)
    for (int w = 0; w < WIDTH; w++) sums[g][w] = load(out + g * dim + at + w * LANES);
  for (int t = 0; t < count; t++) {
    vf row[WIDTH];
    for (int w = 0; w < WIDTH; w++) row[w] = load(values[t] + at + w * LANES);
    for (int g = 0; g < GROUP; g++)
      for (int w = 0; w < WIDTH; w++) sums[g][w] += row[w] * weights[g * TILE + t];
  }
  for (int g = 0; g < GROUP; g++)
    for (int w = 0; w < WIDTH; w++) store(out + g * dim + at + w * LANES, sums[g][w]);
}

template <typename T, int GROUP>
static void accumulate_group(const T* const* values, int count, const float* weights, int dim,
                             float* out) {
  int at = 0;
  for (; at + 4 * LANES <= dim; at += 4 * LANES)
    accumulate<T, GROUP, 4>(values, count, weights, at, dim, out);
  for (; at < dim; at += LANES) accumulate<T, GROUP, 1>(values, count, weights, at, dim, out);
}

template <typename T>
static void accumulate_all(const T* const* values, int count, const float* weights, int group,
                           int dim, float* out) {
  int g = 0;
  for (; g + 4 <= group; g += 4)
    accumulate_group<T, 4>(values, count, weights + g * TILE, dim, out + g * dim);
  weights += g * TILE, out += g * dim;
  switch (group - g) {
    case 3: accumulate_group<T, 3>(values, count, weights, dim, out); break;
    case 2: accumulate_group<T, 2>(values, count, weights, dim, out); break;
    case 1: accumulate_group<T, 1>(values, count, weights, dim, out); break;
  }
}

// Turn a tile's scores into weights under the running maximum; rescale what came before.
static void soften(float* scores, int count, int dim, float* maximum, float* total, float* out) {
  vf high = load(scores);
  for (int t = LANES; t < count; t += LANES) high = vmax(high, load(scores + t));
  const float before = *maximum, now = std::max(before, largest(high));
  vf sums{};
  for (int t = 0; t < count; t += LANES) {
    const vf weight = vexp(load(scores + t) - now);
    store(scores + t, weight);
    sums += weight;
  }
  const float keep = before == now ? 1.f : vexp(splat(before - now))[0];
  *total = *total * keep + sum(sums);
  *maximum = now;
  if (keep != 1.f)
    for (int i = 0; i < dim; i += LANES) store(out + i, load(out + i) * keep);
}

// Ask for slice `index` of `slices` of some rows. Blocks lie anywhere in memory, so the processor
// does not guess them; asking while scores are computed gained up to a factor of two.
template <typename T>
static inline void prefetch(const T* const* rows, int count, int index, int slices, int dim) {
  for (int t = count * index / slices; t < count * (index + 1) / slices; t++)
    for (size_t byte = 0; byte < dim * sizeof(T); byte += 64)
      __builtin_prefetch((const char*)rows[t] + byte);
}

template <typename T, int DIM>
static void attend(const Batch& d, const T* query, const Part& part, float* scores, float* out) {
  const int group = d.heads / d.kv_heads, dim = d.head_dim;
  float *maxima = out, *totals = out + group, *sums = out + 2 * group;
  std::fill(maxima, totals, -INFINITY);
  std::fill(totals, sums + group * dim, 0.f);
  const T* queries = query + part.sequence * d.query_stride +
                     (int64_t)part.kv_head * group * d.query_head_stride;
  const T *keys[TILE], *values[TILE], *next[TILE];
  locate(d, d.key, part.sequence, part.kv_head, part.first, std::min(TILE, part.count), keys);
  for (int done = 0; done < part.count; done += TILE) {
    const int first = part.first + done, count = std::min(TILE, part.count - done);
    const int ahead = std::min(TILE, part.count - done - count);
    locate(d, d.value, part.sequence, part.kv_head, first, count, values);
    locate(d, d.key, part.sequence, part.kv_head, first + count, ahead, next);
    for (int g = 0; g < group; g++) {
      prefetch(values, count, g, group, dim);
      score<T, DIM>(keys, count, queries + g * d.query_head_stride, d, scores + g * TILE);
      prefetch(next, ahead, g, group, dim);
      soften(scores + g * TILE, count, dim, maxima + g, totals + g, sums + g * dim);
    }
    accumulate_all(values, count, scores, group, dim, sums);
    std::memcpy(keys, next, sizeof keys);
  }
}

// Merge the parts of one sequence and KV head, in order, and write the group's rows.
template <typename T>
static void merge(const Batch& d, const float* partials, int parts, T* out) {
  const int group = d.heads / d.kv_heads, dim = d.head_dim;
  const size_t size = partial_floats(d);
  for (int g = 0; g < group; g++) {
    float high = -INFINITY, total = 0;
    for (int p = 0; p < parts; p++) high = std::max(high, partials[p * size + g]);
    std::vector<float> weights(parts);
    for (int p = 0; p < parts; p++) {
      weights[p] = vexp(splat(partials[p * size + g] - high))[0];
      total += weights[p] * partials[p * size + group + g];
    }
    for (int i = 0; i < dim; i += LANES) {
      vf sums{};
      for (int p = 0; p < parts; p++)
        sums += load(partials + p * size + 2 * group + g * dim + i) * weights[p];
      store(out + g * dim + i, sums / total);
    }
  }
}

template <typename T>
static void attend_any(const Batch& d, const T* query, const Part& part, float* scores,
                       float* out) {
  switch (d.head_dim) {
    case 64: return attend<T, 64>(d, query, part, scores, out);
    case 128: return attend<T, 128>(d, query, part, scores, out);
    default: return attend<T, 0>(d, query, part, scores, out);
  }
}

constexpr int64_t PARALLEL_ELEMENTS = 1 << 16;  // of keys; fewer are not worth waking a thread

// One thread for little work. A captured decode is run again with other contexts than it was
// captured with, so it is the kernel that decides.
static int worthwhile(const Batch& d, int threads) {
  int64_t tokens = 0;
  for (int s = 0; s < d.sequences; s++) tokens += d.contexts[s];
  return tokens * d.kv_heads * d.head_dim < PARALLEL_ELEMENTS ? 1 : threads;
}

// Cut the batch into parts, let `attend(part, scores, partial)` compute each, and merge them.
template <typename T, typename Attend>
static void decode_with(const Batch& d, T* out, int threads, const Attend& attend) {
  const int group = d.heads / d.kv_heads;
  std::vector<Part> parts;
  std::vector<size_t> first_part;  // of each (sequence, KV head); one more at the end
  for (int s = 0; s < d.sequences; s++)
    for (int h = 0; h < d.kv_heads; h++) {
      first_part.push_back(parts.size());
      for (int t = 0; t < d.contexts[s]; t += PART)
        parts.push_back({s, h, t, std::min(PART, d.contexts[s] - t)});
    }
  first_part.push_back(parts.size());
  const size_t size = partial_floats(d);
  const std::unique_ptr<float[]> partials(new float[parts.size() * size]);  // not zeroed
#pragma omp parallel num_threads(worthwhile(d, threads))
  {
    std::vector<float> scores((size_t)group * TILE);
#pragma omp for schedule(dynamic)
    for (size_t p = 0; p < parts.size(); p++)
      attend(parts[p], scores.data(), partials.get() + p * size);
#pragma omp for schedule(static)
    for (int i = 0; i < d.sequences * d.kv_heads; i++)
      merge(d, partials.get() + first_part[i] * size, (int)(first_part[i + 1] - first_part[i]),
            out + (int64_t)i * group * d.head_dim);
  }
}

template <typename T>
static void decode(const Batch& d, const T* query, T* out, int threads) {
  decode_with(d, out, threads, [&](const Part& part, float* scores, float* partial) {
    attend_any(d, query, part, scores, partial);
  });
}

// strides: block, token, head of the key cache, then of the value cache, in bytes; then the
// query's token and head strides in elements, then the block table's row stride.
// shape: sequences, heads, kv_heads, head_dim, block_size.
static Batch make_batch(const void* key, const void* value, const int32_t* tables,
                        const int32_t* contexts, const int64_t* strides, const int64_t* shape,
                        float scale) {
  return {{(const char*)key, strides[0], strides[1], strides[2]},
          {(const char*)value, strides[3], strides[4], strides[5]},
          tables, contexts, strides[8],
          (int)shape[0], (int)shape[1], (int)shape[2], (int)shape[3], (int)shape[4],
          strides[6], strides[7], scale};
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
