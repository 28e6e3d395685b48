// Decode attention over paged latents (MLA): a token's key is its latent and its rope row, its
// value is the latent again, and all heads share both.
//
// Heads are processed in groups, as if each group had a KV head of its own at the same address.
// Parts and their merge are then those of decode.cpp, and a result depends on the same inputs only.

// Number of tokens whose latents stay in L1 while all heads of a group add them.
constexpr int LATENT_TOKENS = TOGETHER;

template <typename T>
static void attend_latents(const Batch& d, int rope_dim, const T* query, const Part& part,
                           float* out) {
  const int group = d.heads / d.kv_heads, dim = d.head_dim;
  const char *latents[PART + MOST_AHEAD + LATENT_TOKENS], *ropes[PART];
  Part shared = part;  // all groups share the only KV head
  shared.first_head = 0;
  locate_padded(d, d.key, shared, latents);
  locate_padded(d, d.value, shared, ropes);
  std::fill_n(latents + padded(part.count), MOST_AHEAD + LATENT_TOKENS, latents[0]);
  const std::unique_ptr<float[]> scores(new float[(size_t)group * SCORES]);
  query += part.sequence * d.query_stride + part.first_head * group * d.query_head_stride;
  const auto quads = quads_of(query, d.query_head_stride, group, group, 0, scores.get());
  const Pieces<QUAD, 0> pieces{d.key, 1, dim * (int)sizeof(T)};
  for (int t = 0; t < part.count; t += QUAD)
    for (const auto& quad : quads) {
      vf sums[QUAD * QUAD] = {};
      if (&quad == quads.data()) pieces.ask(latents + t, 0, QUAD);
      add_products<T, 0, true>(quad, latents + t, 0, dim, sums);
      add_products<T, 0, true>(quad, ropes + t, dim, rope_dim, sums);
      put_scores(quad, t, sums, d.scale);
    }
  weigh<T>(scores.get(), part.count, group, dim, out);
  for (int t = 0; t < part.count; t += LATENT_TOKENS)
    accumulate_group<T, LATENT_TOKENS>(latents + t, 0, scores.get(), t, group, dim,
                                       out + 2 * group, [](int, int) {});
  for (int g = 0; g < group; g++)
    put_in_order(out + 2 * group + g * dim, dim, typename Item<T>::Weight{});
}

template <typename T>
static void decode_latents(const Batch& d, int rope_dim, const T* query, T* out, int threads) {
  decode_with(d, 1, out, worthwhile(d, threads), [&](const Part& part, float* partial) {
    attend_latents(d, rope_dim, query, part, partial);
  });
}
// As decode_attention, with latents as keys and rope rows as values. In `shape`, the number of head
// groups replaces kv_heads and the latent's width head_dim; the width of rope rows is appended.
// `out` is dense.
extern "C" void mla_decode_attention(void* out, const void* query, const void* latent,
                                     const void* rope, const int32_t* tables,
                                     const int32_t* contexts, const int64_t* strides,
                                     const int64_t* shape, float scale, int is_bf16, int threads) {
  const Batch d = make_batch(latent, rope, tables, contexts, strides, shape, scale);
  const int rope_dim = (int)shape[5];
  if (is_bf16) decode_latents(d, rope_dim, (const bf16*)query, (bf16*)out, threads);
  else decode_latents(d, rope_dim, (const float*)query, (float*)out, threads);
}
