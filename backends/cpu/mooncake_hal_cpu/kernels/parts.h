// Divides a batch of decodes into parts, and merges their results.
//
// A sequence is divided into parts of PART tokens from its first token on, independently of the
// batch, the number of threads, the block size and the layout. Parts are computed separately, each
// head by itself, and merged in order. The result therefore depends on the sequence only, and a
// single long sequence still keeps every core busy.

struct Part { int sequence, first_head, heads, first, count; };  // KV heads; tokens

// Number of floats in one part's result for one KV head: for each head of its group a maximum, a
// sum, and head_dim weighted sums.
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

constexpr int64_t PARALLEL_ELEMENTS = 1 << 16;  // of keys; with fewer, more threads don't pay off

// The number of threads to use: one for little work. The kernel decides this, because a captured
// decode is replayed with other contexts than it was captured with.
static int worthwhile(const Batch& d, int threads) {
  int64_t tokens = 0;
  for (int s = 0; s < d.sequences; s++) tokens += d.contexts[s];
  return tokens * d.kv_heads * d.head_dim < PARALLEL_ELEMENTS ? 1 : threads;
}

static int parts_of(int context) { return (context + PART - 1) / PART; }

// KV heads per part: `most`, or fewer if threads would be idle otherwise.
static int heads_per_part(const Batch& d, int most, int threads) {
  int parts = 0, heads = std::min(d.kv_heads, std::max(1, most));
  for (int s = 0; s < d.sequences; s++) parts += parts_of(d.contexts[s]);
  while (threads > 1 && heads > 1 && parts * (d.kv_heads / heads) < 4 * threads)
    heads = (heads + 1) / 2;
  return heads;
}

// Round up to a multiple of QUAD.
static int padded(int count) { return (count + QUAD - 1) / QUAD * QUAD; }

// Find the addresses of a part's rows for its first head, padded with the last one.
static void locate_padded(const Batch& d, const Cache& cache, const Part& part,
                          const char** rows) {
  locate(d, cache, part.sequence, part.first_head, part.first, part.count, rows);
  std::fill(rows + part.count, rows + padded(part.count), rows[part.count - 1]);
}

// Divide the batch into parts of `heads` KV heads, compute each with `attend(part, partial)`, and
// merge the results.
template <typename T, typename Attend>
static void decode_with(const Batch& d, int heads, T* out, int threads, const Attend& attend) {
  std::vector<Part> parts;
  std::vector<size_t> first_partial;  // index of each sequence's first result
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
