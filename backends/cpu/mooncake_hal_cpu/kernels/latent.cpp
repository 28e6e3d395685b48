// Decode attention over paged latents (MLA): a token's key is its latent and its rope row, its
// value the latent again, and all heads share them.
//
// Heads are taken in groups, as if each group had a KV head of its own that lies in the same place:
// then parts, tiles and their merging are those of decode.cpp, and so is what a result depends on.

// scores of `count` tokens for one query head; those up to the next multiple of 16 are -inf
template <typename T>
static void score_latents(const T* const* latents, const T* const* ropes, int count, const T* query,
                          const Batch& d, int rope_dim, float* out) {
  for (int t = 0; t < count; t += LANES) {
    vf rows[LANES];
    for (int i = 0; i < LANES; i++) {
      const int token = std::min(t + i, count - 1);
      rows[i] = dot(latents[token], query, d.head_dim) +
                dot(ropes[token], query + d.head_dim, rope_dim);
    }
    vf scores = sum_rows(rows) * d.scale;
    for (int i = count - t; i < LANES; i++) scores[i] = -INFINITY;
    store(out + t, scores);
  }
}

template <typename T>
static void attend_latents(const Batch& d, int rope_dim, const T* query, const Part& part,
                           float* scores, float* out) {
  const int group = d.heads / d.kv_heads, dim = d.head_dim;
  float *maxima = out, *totals = out + group, *sums = out + 2 * group;
  std::fill(maxima, totals, -INFINITY);
  std::fill(totals, sums + group * dim, 0.f);
  const T* queries = query + part.sequence * d.query_stride +
                     (int64_t)part.kv_head * group * d.query_head_stride;
  const T *latents[TILE], *ropes[TILE], *next[TILE];
  locate(d, d.key, part.sequence, 0, part.first, std::min(TILE, part.count), latents);
  for (int done = 0; done < part.count; done += TILE) {
    const int first = part.first + done, count = std::min(TILE, part.count - done);
    const int ahead = std::min(TILE, part.count - done - count);
    locate(d, d.value, part.sequence, 0, first, count, ropes);
    locate(d, d.key, part.sequence, 0, first + count, ahead, next);
    for (int g = 0; g < group; g++) {
      score_latents(latents, ropes, count, queries + g * d.query_head_stride, d, rope_dim,
                    scores + g * TILE);
      prefetch(next, ahead, g, group, dim);
      soften(scores + g * TILE, count, dim, maxima + g, totals + g, sums + g * dim);
    }
    accumulate_all(latents, count, scores, group, dim, sums);
    std::memcpy(latents, next, sizeof latents);
  }
}

template <typename T>
static void decode_latents(const Batch& d, int rope_dim, const T* query, T* out, int threads) {
  decode_with(d, out, threads, [&](const Part& part, float* scores, float* partial) {
    attend_latents(d, rope_dim, query, part, scores, partial);
  });
}

// As decode_attention, with latents for keys and rope rows for values. In `shape` head groups stand
// for KV heads and the latent's width for head_dim; the width of rope rows follows. `out` is dense.
extern "C" void mla_decode_attention(void* out, const void* query, const void* latent,
                                     const void* rope, const int32_t* tables,
                                     const int32_t* contexts, const int64_t* strides,
                                     const int64_t* shape, float scale, int is_bf16, int threads) {
  const Batch d = make_batch(latent, rope, tables, contexts, strides, shape, scale);
  const int rope_dim = (int)shape[5];
  if (is_bf16) decode_latents(d, rope_dim, (const bf16*)query, (bf16*)out, threads);
  else decode_latents(d, rope_dim, (const float*)query, (float*)out, threads);
}
