// Linear layers in bf16, with float sums.
//
// The weight is arranged in panels of 64 outputs: [panel][input / 2][output][2], so that a decode
// reads it once, sequentially, at memory bandwidth. Each output is one sum over the inputs in their
// order, for any number of rows: a token's result has the same bits alone, in a batch, in a chunk
// of its prompt, or when it is verified with draft tokens.

constexpr int PANEL = 64;           // outputs
constexpr int TILE_ROWS = 6;        // rows that share a pass over a part of a panel
constexpr int64_t CHUNK_ROWS = 60;  // rows whose sums fit in L1 with a block of the panel
constexpr int64_t BLOCK_PAIRS = 128;
constexpr int64_t AHEAD = 2048;     // bytes of the panel to prefetch ahead

struct Linear {
  const bf16 *x, *weight, *bias;
  bf16* out;
  int64_t rows, x_stride, pairs, outputs;
};

// sum + weights[0] * x[0] + weights[1] * x[1], for a register of weight pairs, one per output. x is
// bf16 if one instruction multiplies such pairs, otherwise float.
#if defined(__AVX512BF16__)
using Input = bf16;
static inline vf add_pair(vf sum, vu weights, const Input* x) {
  return multiply_add(sum, Pairs{(__m512i)weights}, get_weight(x));
}
#else
using Input = float;
static inline vf add_pair(vf sum, vu weights, const Input* x) {
  sum += (vf)(weights << 16) * x[0];
  return sum + (vf)(weights & 0xffff0000u) * x[1];
}
#endif

// Registers of outputs per row that ROWS rows sum at once; sums take at most 3/4 of all registers.
template <int ROWS>
constexpr int columns() {
  int most = PANEL / LANES;
  while (most * ROWS > REGISTERS * 3 / 4) most /= 2;
  return most;
}

// sums: [ROWS][PANEL], carried over a panel's blocks
template <int ROWS>
static void multiply(const Input* x, int64_t x_stride, const bf16* panel, int64_t pairs,
                     float* sums) {
  constexpr int COLUMNS = columns<ROWS>();
  for (int first = 0; first < PANEL; first += COLUMNS * LANES) {
    vf acc[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < COLUMNS; c++) acc[r][c] = load(sums + r * PANEL + first + c * LANES);
    const bf16* at = panel + 2 * first;
    for (int64_t k = 0; k < pairs; k++, at += 2 * PANEL) {
      vu weights[COLUMNS];
      for (int c = 0; c < COLUMNS; c++)
        std::memcpy(&weights[c], at + c * 2 * LANES, sizeof weights[c]);
      for (int line = 0; line < COLUMNS * LANES; line += 16)
        __builtin_prefetch((const char*)(at + 2 * line) + AHEAD);
      for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++)
          acc[r][c] = add_pair(acc[r][c], weights[c], x + r * x_stride + 2 * k);
    }
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < COLUMNS; c++) store(sums + r * PANEL + first + c * LANES, acc[r][c]);
  }
}

static void multiply_any(int64_t rows, const Input* x, int64_t x_stride, const bf16* panel,
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

// Rows in the type that `add_pair` expects.
struct Inputs { const Input* rows; int64_t stride; };

#if defined(__AVX512BF16__)
constexpr int64_t WIDENED = 1;
static Inputs inputs(const bf16* x, int64_t stride, int64_t, int64_t, Input*) {
  return {x, stride};
}
#else
constexpr int64_t WIDENED = CHUNK_ROWS * 2 * BLOCK_PAIRS;
static Inputs inputs(const bf16* x, int64_t stride, int64_t rows, int64_t width, Input* widened) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < width; i++) widened[r * width + i] = widen(x[r * stride + i]);
  return {widened, width};
}
#endif

static void store_sums(const Linear& d, int64_t first, int64_t rows, int64_t column,
                       const float* sums) {
  for (int64_t c = 0; c < PANEL && column + c < d.outputs; c += LANES) {
    const int64_t left = std::min<int64_t>(LANES, d.outputs - column - c);
    bf16 row[LANES] = {};
    if (d.bias != nullptr) std::memcpy(row, d.bias + column + c, left * sizeof *row);
    const vf bias = load(row);
    for (int64_t r = 0; r < rows; r++) {
      bf16* to = d.out + (first + r) * d.outputs + column + c;
      const vf sum = load(sums + r * PANEL + c) + bias;
      if (left == LANES) {
        store(to, sum);
      } else {
        store(row, sum);
        std::memcpy(to, row, left * sizeof *row);
      }
    }
  }
}

// One panel's outputs for rows `first` to `last` (exclusive).
static void linear_panel(const Linear& d, int64_t first, int64_t last, int64_t panel) {
  alignas(64) float sums[CHUNK_ROWS * PANEL];
  alignas(64) Input widened[WIDENED];
  const int64_t count = last - first;
  std::memset(sums, 0, count * PANEL * sizeof(float));
  const int64_t tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
  for (int64_t k = 0; k < d.pairs; k += BLOCK_PAIRS) {
    const int64_t pairs = std::min(BLOCK_PAIRS, d.pairs - k);
    const bf16* weight = d.weight + (panel * d.pairs + k) * 2 * PANEL;
    const Inputs x =
        inputs(d.x + first * d.x_stride + 2 * k, d.x_stride, count, 2 * pairs, widened);
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t from = count * t / tiles, to = count * (t + 1) / tiles;
      multiply_any(to - from, x.rows + from * x.stride, x.stride, weight, pairs,
                   sums + from * PANEL);
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
