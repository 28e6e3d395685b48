// How a batch of decodes is cut into units of work, and merged again.
//
// A sequence is cut into parts of PART tokens from its first token on, whatever the batch, the
// thread count, the block size or the layout; parts are computed on their own, each head by itself, and
// merged in order. So the result depends on the sequence alone, and a lone long sequence still
// keeps every core busy.

struct Part { int sequence, first_head, heads, first, count; };  // KV heads; tokens

// Floats of one part's result for one KV head: for each head of its group a maximum, a sum, and
// head_dim weighted sums.
static inline size_t partial_floats(const Batch& d) {
  return (size_t)(d.heads / d.kv_heads) * (d.head_dim + 2);
}

// Merge the parts of one sequence and KV head, in order, and write the group's rows.
template <typename T>
static void merge(const Batch& d, const float* partials, int parts, T* out) {
  const int group = d.heads / d.kv_heads, dim = d.head_dim;
  const size_t stride = partial_floats(d) * d.kv_heads;
  std::vector<float> weights(parts);
  for (int g = 0; g < group; g++) {
    float high = -INFINITY, total = 0;
    for (int p = 0; p < parts; p++) high = std::max(high, partials[p * stride + g]);
    for (int p = 0; p < parts; p++) {
      weights[p] = vexp(splat(partials[p * stride + g] - high))[0];
      total += weights[p] * partials[p * stride + group + g];
    }
    for (int i = 0; i < dim; i += LANES) {
      vf sums{};
      for (int p = 0; p < parts; p++)
        sums += load(partials + p * stride + 2 * group + g * dim + i) * weights[p];
      store(out + g * dim + i, sums / total);
    }
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

static int parts_of(int context) { return (context + PART - 1) / PART; }

// KV heads to a part: `most`, or fewer where threads would go without work.
static int heads_per_part(const Batch& d, int most, int threads) {
  int parts = 0, heads = std::min(d.kv_heads, std::max(1, most));
  for (int s = 0; s < d.sequences; s++) parts += parts_of(d.contexts[s]);
  while (threads > 1 && heads > 1 && parts * (d.kv_heads / heads) < 4 * threads)
    heads = (heads + 1) / 2;
  return heads;
}

// Addresses of a part's rows of its first head; the last one again up to a multiple of QUAD.
static int padded(int count) { return (count + QUAD - 1) / QUAD * QUAD; }

static void locate_padded(const Batch& d, const Cache& cache, const Part& part,
                          const char** rows) {
  locate(d, cache, part.sequence, part.first_head, part.first, part.count, rows);
  std::fill(rows + part.count, rows + padded(part.count), rows[part.count - 1]);
}

// Cut the batch into parts of `heads` KV heads, let `attend(part, partial)` compute each, merge.
template <typename T, typename Attend>
static void decode_with(const Batch& d, int heads, T* out, int threads, const Attend& attend) {
  std::vector<Part> parts;
  std::vector<size_t> first_partial;  // of each sequence
  size_t partials_so_far = 0;
  for (int s = 0; s < d.sequences; s++) {
    for (int t = 0; t < d.contexts[s]; t += PART)
      for (int h = 0; h < d.kv_heads; h += heads)
        parts.push_back({s, h, std::min(heads, d.kv_heads - h), t,
                         std::min(PART, d.contexts[s] - t)});
    first_partial.push_back(partials_so_far);
    partials_so_far += parts_of(d.contexts[s]) * d.kv_heads;
  }
  const size_t size = partial_floats(d);
  const std::unique_ptr<float[]> partials(new float[partials_so_far * size]);  // not zeroed
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic)
    for (size_t p = 0; p < parts.size(); p++) {
      const Part& part = parts[p];
      const size_t index = first_partial[part.sequence] + part.first / PART * d.kv_heads;
      attend(part, partials.get() + (index + part.first_head) * size);
    }
#pragma omp for schedule(static)
    for (int i = 0; i < d.sequences * d.kv_heads; i++) {
      const int s = i / d.kv_heads, h = i % d.kv_heads;
      merge(d, partials.get() + (first_partial[s] + h) * size, parts_of(d.contexts[s]),
            out + (int64_t)i * (d.heads / d.kv_heads) * d.head_dim);
    }
  }
}
