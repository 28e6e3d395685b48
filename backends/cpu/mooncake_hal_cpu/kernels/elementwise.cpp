// Norm, rotation, gate and cache writes: each is one pass over its rows, which are independent.

// Rows of a tensor with two outer dimensions; strides in elements.
struct Rows { int64_t outer, inner, outer_stride, inner_stride; };

template <typename T>
static void normalise(const T* x, const T* weight, T* out, int64_t dim, float eps) {
  vf squares{};
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) {
    const vf value = load(x + i);
    squares += value * value;
  }
  float total = sum(squares);
  for (; i < dim; i++) total += widen(x[i]) * widen(x[i]);
  const float inverse = 1.f / std::sqrt(total / dim + eps);
  for (i = 0; i + LANES <= dim; i += LANES)
    store(out + i, load(x + i) * inverse * load(weight + i));
  for (; i < dim; i++) narrow(out + i, widen(x[i]) * inverse * widen(weight[i]));
}

template <typename T>
static void rms_norm_rows(const T* x, const T* weight, T* out, Rows rows, int64_t dim, float eps,
                          int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows.outer * rows.inner; row++) {
    const int64_t at = row / rows.inner * rows.outer_stride + row % rows.inner * rows.inner_stride;
    normalise(x + at, weight, out + row * dim, dim, eps);
  }
}

template <typename T>
static void add_rms_norm_rows(T* x, T* residual, const T* weight, int64_t rows, int64_t dim,
                              float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; row++) {
    T *a = x + row * dim, *b = residual + row * dim;
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) store(b + i, load(a + i) + load(b + i));
    for (; i < dim; i++) narrow(b + i, widen(a[i]) + widen(b[i]));
    normalise(b, weight, a, dim, eps);
  }
}

template <typename T>
static void rotate(T* x, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    const vf first = load(x + i), second = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, first * c - second * s);
    store(x + half + i, second * c + first * s);
  }
  for (; i < half; i++) {
    const float first = widen(x[i]), second = widen(x[half + i]);
    narrow(x + i, first * cos[i] - second * sin[i]);
    narrow(x + half + i, second * cos[i] + first * sin[i]);
  }
}

// `outer` is the number of tokens, `inner` the number of heads
template <typename T>
static void rope_rows(T* query, Rows q, T* key, Rows k, const int64_t* positions,
                      const float* cos_sin, int64_t rotary_dim, int threads) {
  const int64_t half = rotary_dim / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < q.outer; t++) {
    const float *cos = cos_sin + positions[t] * rotary_dim, *sin = cos + half;
    for (int64_t h = 0; h < q.inner; h++)
      rotate(query + t * q.outer_stride + h * q.inner_stride, cos, sin, half);
    for (int64_t h = 0; h < k.inner; h++)
      rotate(key + t * k.outer_stride + h * k.inner_stride, cos, sin, half);
  }
}

template <typename T>
static void silu_mul_rows(const T* x, T* out, int64_t rows, int64_t stride, int64_t half,
                          int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; row++) {
    const T *gate = x + row * stride, *up = gate + half;
    T* to = out + row * half;
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
      const vf g = load(gate + i);
      store(to + i, g / (1.f + vexp(-g)) * load(up + i));
    }
    for (; i < half; i++) {
      const float g = widen(gate[i]);
      narrow(to + i, g / (1.f + vexp(splat(-g))[0]) * widen(up[i]));
    }
  }
}

extern "C" {

// shape: outer, inner, outer stride, inner stride, dim
void rms_norm(const void* x, const void* weight, void* out, int64_t outer, int64_t inner,
              int64_t outer_stride, int64_t inner_stride, int64_t dim, float eps, int is_bf16,
              int threads) {
  const Rows rows{outer, inner, outer_stride, inner_stride};
  if (is_bf16)
    rms_norm_rows((const bf16*)x, (const bf16*)weight, (bf16*)out, rows, dim, eps, threads);
  else
    rms_norm_rows((const float*)x, (const float*)weight, (float*)out, rows, dim, eps, threads);
}

// in place: residual receives the sum, x the sum's norm
void add_rms_norm(void* x, void* residual, const void* weight, int64_t rows, int64_t dim, float eps,
                  int is_bf16, int threads) {
  if (is_bf16)
    add_rms_norm_rows((bf16*)x, (bf16*)residual, (const bf16*)weight, rows, dim, eps, threads);
  else
    add_rms_norm_rows((float*)x, (float*)residual, (const float*)weight, rows, dim, eps, threads);
}

// shape: tokens, query heads, key heads, rotary_dim; token and head strides of query, then of key
void rope(void* query, void* key, const int64_t* positions, const float* cos_sin,
          const int64_t* shape, int is_bf16, int threads) {
  const Rows q{shape[0], shape[1], shape[4], shape[5]}, k{shape[0], shape[2], shape[6], shape[7]};
  if (is_bf16)
    rope_rows((bf16*)query, q, (bf16*)key, k, positions, cos_sin, shape[3], threads);
  else
    rope_rows((float*)query, q, (float*)key, k, positions, cos_sin, shape[3], threads);
}

void silu_mul(const void* x, void* out, int64_t rows, int64_t stride, int64_t half, int is_bf16,
              int threads) {
  if (is_bf16) silu_mul_rows((const bf16*)x, (bf16*)out, rows, stride, half, threads);
  else silu_mul_rows((const float*)x, (float*)out, rows, stride, half, threads);
}

// layout: in bytes, token and head strides of key, then of value; block, token and head strides of
// the key cache, then of the value cache. Then tokens, heads, block_size, and the bytes of one head
// of key and of value.
void write_kv(const char* key, const char* value, char* key_cache, char* value_cache,
              const int64_t* slots, const int64_t* layout, int threads) {
  const int64_t tokens = layout[10], heads = layout[11], block_size = layout[12];
  const size_t key_bytes = layout[13], value_bytes = layout[14];
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tokens; t++) {
    const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
    char* k = key_cache + block * layout[4] + offset * layout[5];
    char* v = value_cache + block * layout[7] + offset * layout[8];
    for (int64_t h = 0; h < heads; h++) {
      std::memcpy(k + h * layout[6], key + t * layout[0] + h * layout[1], key_bytes);
      std::memcpy(v + h * layout[9], value + t * layout[2] + h * layout[3], value_bytes);
    }
  }
}

}  // extern "C"
