// Linear layers in bf16 with the processor's dot product of pairs (AVX512-BF16).
//
// The weight is laid out in panels of 64 outputs: [panel][input / 2][output][2], so that a decode
// reads it once, front to back, at the speed of memory. Each output is one sum over the inputs in
// their order, whatever the number of rows: a token's result is the same to the bit alone, in a
// batch, in a chunk of its prompt, or verified beside drafts.
#if defined(__AVX512BF16__)

constexpr int PANEL = 64;           // outputs; four registers of sums for each row
constexpr int TILE_ROWS = 6;        // rows that share a pass over a panel: 24 of 32 registers
constexpr int64_t CHUNK_ROWS = 60;  // whose sums and a block of the panel fit the first cache
constexpr int64_t BLOCK_PAIRS = 128;
constexpr int64_t AHEAD = 2048;     // bytes of the panel to ask for early

struct Linear {
  const bf16 *x, *weight, *bias;
  bf16* out;
  int64_t rows, x_stride, pairs, outputs;
};

// sums: [ROWS][PANEL], kept between a panel's blocks
template <int ROWS>
static void multiply(const bf16* x, int64_t x_stride, const bf16* panel, int64_t pairs,
                     float* sums) {
  __m512 acc[ROWS][4];
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < 4; c++) acc[r][c] = _mm512_loadu_ps(sums + r * PANEL + c * 16);
  for (int64_t k = 0; k < pairs; k++, panel += 2 * PANEL) {
    __m512bh weight[4];
    for (int c = 0; c < 4; c++) {
      weight[c] = (__m512bh)_mm512_loadu_si512(panel + c * 32);
      _mm_prefetch((const char*)(panel + c * 32) + AHEAD, _MM_HINT_T0);
    }
    for (int r = 0; r < ROWS; r++) {
      int32_t pair;
      std::memcpy(&pair, x + r * x_stride + 2 * k, sizeof pair);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      for (int c = 0; c < 4; c++) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], both, weight[c]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < 4; c++) _mm512_storeu_ps(sums + r * PANEL + c * 16, acc[r][c]);
}

static void multiply_any(int64_t rows, const bf16* x, int64_t x_stride, const bf16* panel,
                         int64_t pairs, float* sums) {
  switch (rows) {
    case 1: return multiply<1>(x, x_stride, panel, pairs, sums);
    case 2: return multiply<2>(x, x_stride, panel, pairs, sums);
    case 3: return multiply<3>(x, x_stride, panel, pairs, sums);
    case 4: return multiply<4>(x, x_stride, panel, pairs, sums);
    case 5: return multiply<5>(x, x_stride, panel, pairs, sums);
    default: return multiply<6>(x, x_stride, panel, pairs, sums);
  }
}

static void store_sums(const Linear& d, int64_t first, int64_t rows, int64_t column,
                       const float* sums) {
  for (int64_t c = 0; c < PANEL && column + c < d.outputs; c += LANES) {
    const int64_t left = std::min<int64_t>(LANES, d.outputs - column - c);
    const __mmask16 mask = (__mmask16)((1u << left) - 1u);
    __m512 bias = _mm512_setzero_ps();
    if (d.bias != nullptr) {
      const __m256i raw = _mm256_maskz_loadu_epi16(mask, d.bias + column + c);
      bias = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16);
    }
    for (int64_t r = 0; r < rows; r++) {
      const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(sums + r * PANEL + c), bias);
      _mm256_mask_storeu_epi16(d.out + (first + r) * d.outputs + column + c, mask,
                               (__m256i)_mm512_cvtneps_pbh(sum));
    }
  }
}

// Rows `first` to `last` of one panel's outputs.
static void linear_panel(const Linear& d, int64_t first, int64_t last, int64_t panel) {
  alignas(64) float sums[CHUNK_ROWS * PANEL];
  const int64_t count = last - first;
  std::memset(sums, 0, count * PANEL * sizeof(float));
  const int64_t tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
  for (int64_t k = 0; k < d.pairs; k += BLOCK_PAIRS) {
    const bf16* weight = d.weight + (panel * d.pairs + k) * 2 * PANEL;
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t from = count * t / tiles, to = count * (t + 1) / tiles;
      multiply_any(to - from, d.x + (first + from) * d.x_stride + 2 * k, d.x_stride, weight,
                   std::min(BLOCK_PAIRS, d.pairs - k), sums + from * PANEL);
    }
  }
  store_sums(d, first, count, panel * PANEL, sums);
}

// shape: rows, stride of x in elements, inputs (even), outputs. `out` is dense, `bias` may be null.
extern "C" void linear(void* out, const void* x, const void* weight, const void* bias,
                       const int64_t* shape, int threads) {
  const Linear d{(const bf16*)x, (const bf16*)weight, (const bf16*)bias, (bf16*)out,
                 shape[0], shape[1], shape[2] / 2, shape[3]};
  const int64_t chunks = (d.rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
  const int64_t panels = (d.outputs + PANEL - 1) / PANEL;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t p = 0; p < panels; p++)
    for (int64_t c = 0; c < chunks; c++)
      linear_panel(d, d.rows * c / chunks, d.rows * (c + 1) / chunks, p);
}
#endif
