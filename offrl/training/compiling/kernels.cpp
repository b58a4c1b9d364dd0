// What an update needs and general libraries are slow at: matrix products in float32, and random keys, on one core (see `kernels.py`).
//
// gated: the backward pass through the last hidden layer of a ReLU network with one output. The gradient there is
//     G = diag(outer) [gate > 0] diag(inner),
// with the loss's derivative, which units were active, and the last layer's weights: zeros and ones between two vectors. A product with a
// matrix of zeros and ones is sums of rows; all 16 sums of each 4 rows are made once and looked up (the method of four Russians): a quarter
// of the additions, and no multiplications.
//
// product: dense ones, without a library's preparations for each call, which take as long as a first layer. Panels of B are packed, a tile of
// C stays in registers (Goto and van de Geijn, 2008). With a vector, the last layer itself, it is sums of rows or of columns.

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#if defined(__AVX512F__)
#define LANES 16
#define ROWS 12  // of a tile: 24 of 32 registers hold sums
#else
#define LANES 8
#define ROWS 6
#endif

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES), aligned(4)));

namespace {

constexpr int64_t WIDE = 2 * LANES;              // columns of a tile
constexpr int64_t DEPTH = 512, COLUMNS = 256;    // of B that are packed at once
constexpr int64_t BLOCK = 64;                    // columns of a table of sums
constexpr int64_t GROUPS = 8, FEW = 4 * GROUPS;  // tables that lie in the first-level cache at once (32 KB), and the rows that they are of

inline Vector load(const float* from) { return *(const Vector*)from; }
inline void store(float* to, Vector x) { *(Vector*)to = x; }

struct Matrix {  // by strides
  const float* data;
  int64_t down, across;
  const float& at(int64_t i, int64_t j) const { return data[i * down + j * across]; }
  Matrix turned() const { return {data, across, down}; }
  Matrix from(int64_t i, int64_t j) const { return {&at(i, j), down, across}; }
};

float* space(int64_t floats) {  // for one caller at a time
  static thread_local float* memory = nullptr;
  static thread_local int64_t size = 0;
  if (size < floats) {
    std::free(memory);
    size = (floats + 1023) / 1024 * 1024;
    memory = (float*)std::aligned_alloc(64, 4 * size);
  }
  return memory;
}

// to[k, n] = from[n, k], LANES x LANES; step: from one row of `from` or `to` to the next
inline void transpose(const float* from, int64_t from_step, float* to, int64_t to_step) {
#if defined(__clang__)
  for (int n = 0; n < LANES; n++)
    for (int k = 0; k < LANES; k++) to[k * to_step + n] = from[n * from_step + k];
#else
  Vector x[LANES];
#pragma GCC unroll 16
  for (int n = 0; n < LANES; n++) x[n] = load(from + n * from_step);
#pragma GCC unroll 4
  for (int d = 1; d < LANES; d *= 2) {  // swaps the off-diagonal quarters of blocks of 2 d
    Integers low, high;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
      low[i] = i & d ? LANES + i - d : i;
      high[i] = i & d ? LANES + i : i + d;
    }
#pragma GCC unroll 16
    for (int n = 0; n < LANES; n++)
      if (!(n & d)) {
        Vector upper = x[n], lower = x[n + d];
        x[n] = __builtin_shuffle(upper, lower, low);
        x[n + d] = __builtin_shuffle(upper, lower, high);
      }
  }
#pragma GCC unroll 16
  for (int k = 0; k < LANES; k++) store(to + k * to_step, x[k]);
#endif
}

// to[k * stride + n] = b[k, n], n < width, filled up with zeros to `full`
void copy(Matrix b, int64_t depth, int64_t width, int64_t full, float* to, int64_t stride) {
  if (b.across == 1) {
    bool vectors = width == full && full % LANES == 0;
    for (int64_t k = 0; vectors && k < depth; k++)
      for (int64_t n = 0; n < width; n += LANES) store(to + k * stride + n, load(&b.at(k, n)));
    for (int64_t k = 0; !vectors && k < depth; k++) {
      std::copy_n(&b.at(k, 0), width, to + k * stride);
      std::fill_n(to + k * stride + width, full - width, 0.0f);
    }
    return;
  }
  for (int64_t n = 0; n < full; n += LANES) {
    int64_t k = 0;
    if (b.down == 1 && n + LANES <= width)
      for (; k + LANES <= depth; k += LANES) transpose(&b.at(k, n), b.across, to + k * stride + n, stride);
    for (; k < depth; k++)
      for (int64_t l = n; l < std::min(n + LANES, full); l++) to[k * stride + l] = l < width ? b.at(k, l) : 0.0f;
  }
}

// ---- dense products

// C[R, W vectors] (+)= A[R, depth] B[depth, W vectors]; A by rows, or by columns if TURNED
template <int R, int W, bool TURNED>
void tile(const float* a, int64_t a_step, const float* b, int64_t b_step, float* c, int64_t c_step, int64_t depth, bool add, int64_t width) {
  Vector sum[R][W];
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int w = 0; w < W; w++) sum[r][w] = Vector{};
  for (int64_t k = 0; k < depth; k++) {
    Vector right[W];
#pragma GCC unroll 2
    for (int w = 0; w < W; w++) right[w] = load(b + k * b_step + w * LANES);
#pragma GCC unroll 32
    for (int r = 0; r < R; r++) {
      Vector left = Vector{} + (TURNED ? a[k * a_step + r] : a[r * a_step + k]);
#pragma GCC unroll 2
      for (int w = 0; w < W; w++) sum[r][w] += left * right[w];
    }
  }
#pragma GCC unroll 32
  for (int r = 0; r < R; r++) {
    float* to = c + r * c_step;
    if (width == W * LANES) {
#pragma GCC unroll 2
      for (int w = 0; w < W; w++) store(to + w * LANES, add ? load(to + w * LANES) + sum[r][w] : sum[r][w]);
    } else {
      float row[W * LANES];
#pragma GCC unroll 2
      for (int w = 0; w < W; w++) store(row + w * LANES, sum[r][w]);
      for (int64_t j = 0; j < width; j++) to[j] = add ? to[j] + row[j] : row[j];
    }
  }
}

typedef void (*Tile)(const float*, int64_t, const float*, int64_t, float*, int64_t, int64_t, bool, int64_t);
#define TILE(R) {{tile<R, 1, false>, tile<R, 1, true>}, {tile<R, 2, false>, tile<R, 2, true>}}
const int64_t HEIGHTS[] = {ROWS, ROWS / 3 * 2, ROWS / 3, ROWS / 6, 1};
const Tile TILES[][2][2] = {TILE(ROWS), TILE(ROWS / 3 * 2), TILE(ROWS / 3), TILE(ROWS / 6), TILE(1)};

// C = A B, by rows
void product(Matrix a, Matrix b, float* c, int64_t rows, int64_t columns, int64_t depth) {
  float* packed = space(DEPTH * COLUMNS + (a.down != 1 && a.across != 1 ? rows * depth : 0));
  if (a.down != 1 && a.across != 1) {
    copy(a, rows, depth, depth, packed + DEPTH * COLUMNS, depth);
    a = {packed + DEPTH * COLUMNS, depth, 1};
  }
  bool turned = a.across != 1;
  for (int64_t j0 = 0; j0 < columns; j0 += COLUMNS) {
    int64_t wide = std::min(COLUMNS, columns - j0);
    for (int64_t k0 = 0; k0 < depth; k0 += DEPTH) {
      int64_t deep = std::min(DEPTH, depth - k0);
      bool direct = b.across == 1 && rows <= 2 * ROWS && wide % WIDE == 0;  // packing would take longer than it saves
      for (int64_t j = 0; !direct && j < wide; j += WIDE) copy(b.from(k0, j0 + j), deep, std::min(WIDE, wide - j), WIDE, packed + j * deep, WIDE);
      for (int64_t i = 0, kind = 0; i < rows; i += HEIGHTS[kind]) {
        while (HEIGHTS[kind] > rows - i) kind++;
        for (int64_t j = 0; j < wide; j += WIDE) {
          int64_t width = std::min(WIDE, wide - j);
          const float* right = direct ? &b.at(k0, j0 + j) : packed + j * deep;
          TILES[kind][width > LANES][turned](&a.at(i, k0), turned ? a.across : a.down, right, direct ? b.down : WIDE, c + i * columns + j0 + j, columns,
                                             deep, k0 > 0, width);
        }
      }
    }
  }
}

// c = A b
void product(Matrix a, const float* b, int64_t b_step, float* c, int64_t rows, int64_t depth) {
  float* dense = space(depth);
  for (int64_t k = 0; k < depth; k++) dense[k] = b[k * b_step];
  if (a.across != 1) {  // sums of columns
    std::fill_n(c, rows, 0.0f);
    for (int64_t k = 0; k < depth; k++)
      for (int64_t i = 0; i < rows; i++) c[i] += dense[k] * a.at(i, k);
    return;
  }
  for (int64_t i = 0; i < rows; i++) {
    const float* row = &a.at(i, 0);
    Vector sums[4] = {};
    int64_t k = 0;
    for (; k + 4 * LANES <= depth; k += 4 * LANES)
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) sums[v] += load(row + k + v * LANES) * load(dense + k + v * LANES);
    float total = 0.0f;
    Vector all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (int lane = 0; lane < LANES; lane++) total += all[lane];
    for (; k < depth; k++) total += row[k] * dense[k];
    c[i] = total;
  }
}

// ---- products with a gated matrix

// to[i * words + k / 32]: which of gate[i, k] are not at or below 0 (NaN is not)
void active(Matrix gate, int64_t rows, int64_t depth, int64_t words, uint32_t* to) {
  std::fill_n(to, rows * words, 0u);
  if (gate.across == 1) {
    for (int64_t i = 0; i < rows; i++) {
      const float* row = &gate.at(i, 0);
      int64_t k = 0;
      for (; k + 32 <= depth; k += 32) {
        uint32_t word = 0;
        for (int bit = 0; bit < 32; bit++) word |= (uint32_t) !(row[k + bit] <= 0.0f) << bit;
        to[i * words + k / 32] = word;
      }
      for (; k < depth; k++) to[i * words + k / 32] |= (uint32_t) !(row[k] <= 0.0f) << (k % 32);
    }
    return;
  }
  for (int64_t w = 0; w < words; w++) {
    int64_t end = std::min<int64_t>(32, depth - 32 * w), i = 0;
    for (; gate.down == 1 && i + LANES <= rows; i += LANES) {
      Integers word = {};
      for (int64_t bit = 0; bit < end; bit++) word |= ~(load(&gate.at(i, 32 * w + bit)) <= Vector{}) & (int32_t)(1u << bit);
      for (int lane = 0; lane < LANES; lane++) to[(i + lane) * words + w] = (uint32_t)word[lane];
    }
    for (; i < rows; i++)
      for (int64_t bit = 0; bit < end; bit++) to[i * words + w] |= (uint32_t) !(gate.at(i, 32 * w + bit) <= 0.0f) << bit;
  }
}

// All sums of 4 rows of block[FEW, BLOCK], in tables of 16 rows
template <int V>
void tabulate(const float* block, float* tables) {
  for (int64_t g = 0; g < GROUPS; g++)
    for (int v = 0; v < V; v++) {
      const float* from = block + 4 * g * BLOCK + v * LANES;
      float* to = tables + 16 * g * BLOCK + v * LANES;
      Vector sums[16];
      sums[0] = Vector{};
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++) {
        Vector row = load(from + r * BLOCK);
#pragma GCC unroll 8
        for (int i = 0; i < 1 << r; i++) sums[(1 << r) + i] = sums[i] + row;
      }
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) store(to + i * BLOCK, sums[i]);
    }
}

// to[rows, V vectors] (+)= the tables' rows that the bits name, the last time times `scale`
template <int V>
void look_up(const uint32_t* bits, int64_t words, const float* tables, float* to, int64_t down, int64_t rows, bool add, const float* scale, int64_t step) {
  for (int64_t i = 0; i < rows; i++) {
    uint64_t word = (uint64_t)bits[i * words] << 8;  // four bits, times the 256 bytes of a row
    float* row = to + i * down;
    Vector sum[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) sum[v] = add ? load(row + v * LANES) : Vector{};
#pragma GCC unroll 8
    for (int64_t g = 0; g < GROUPS; g++) {
      const float* from = (const float*)((const char*)(tables + 16 * g * BLOCK) + ((word >> (4 * g)) & 0xF00));
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sum[v] += load(from + v * LANES);
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) store(row + v * LANES, scale ? sum[v] * scale[i * step] : sum[v]);
  }
}

typedef void (*Tabulate)(const float*, float*);
typedef void (*LookUp)(const uint32_t*, int64_t, const float*, float*, int64_t, int64_t, bool, const float*, int64_t);
const Tabulate TABULATE[] = {tabulate<1>, tabulate<2>, tabulate<3>, tabulate<4>,
#if LANES == 8
                             tabulate<5>, tabulate<6>, tabulate<7>, tabulate<8>,
#endif
};
const LookUp LOOK_UP[] = {look_up<1>, look_up<2>, look_up<3>, look_up<4>,
#if LANES == 8
                          look_up<5>, look_up<6>, look_up<7>, look_up<8>,
#endif
};

// out = diag(outer) [gate > 0] diag(inner) right; out by rows, or by columns if `turned`
void gated(Matrix gate, const float* outer, int64_t outer_step, const float* inner, int64_t inner_step, Matrix right, float* out, bool turned, int64_t rows,
           int64_t columns, int64_t depth) {
  alignas(64) static thread_local float tables[GROUPS * 16 * BLOCK], block[FEW * BLOCK];
  int64_t words = (depth + 31) / 32;
  float* sums = space(rows * (BLOCK + words));
  uint32_t* bits = (uint32_t*)(sums + rows * BLOCK);
  active(gate, rows, depth, words, bits);
  for (int64_t j = 0; j < columns; j += BLOCK) {
    int64_t width = std::min(BLOCK, columns - j), vectors = (width + LANES - 1) / LANES, full = vectors * LANES;
    bool direct = !turned && full == width;
    float* to = direct ? out + j : sums;
    int64_t down = direct ? columns : BLOCK;
    for (int64_t k0 = 0; k0 < depth; k0 += FEW) {
      int64_t deep = std::min(FEW, depth - k0);
      copy(right.from(k0, j), deep, width, full, block, BLOCK);
      std::fill(block + deep * BLOCK, block + FEW * BLOCK, 0.0f);
      for (int64_t k = 0; k < deep; k++)
        for (int64_t v = 0; v < vectors; v++) {
          float* at = block + k * BLOCK + v * LANES;
          store(at, load(at) * inner[(k0 + k) * inner_step]);
        }
      TABULATE[vectors - 1](block, tables);
      LOOK_UP[vectors - 1](bits + k0 / 32, words, tables, to, down, rows, k0 > 0, k0 + FEW >= depth ? outer : nullptr, outer_step);
    }
    if (turned)
      copy(Matrix{sums, BLOCK, 1}.turned(), width, rows, rows, out + j * rows, rows);
    else if (!direct)
      copy(Matrix{sums, BLOCK, 1}, rows, width, width, out + j, columns);
  }
}

}  // namespace

extern "C" {

// c[count, rows] = a[count, rows, depth] b[count, depth]. *_by: strides
void offrl_vector_product(const float* a, const int64_t* a_by, const float* b, const int64_t* b_by, float* c, int64_t count, int64_t rows, int64_t depth) {
  for (int64_t n = 0; n < count; n++) product({a + n * a_by[0], a_by[1], a_by[2]}, b + n * b_by[0], b_by[1], c + n * rows, rows, depth);
}

// c[count, rows, columns] = a[count, rows, depth] b[count, depth, columns]
void offrl_product(const float* a, const int64_t* a_by, const float* b, const int64_t* b_by, float* c, int64_t count, int64_t rows, int64_t columns,
                   int64_t depth) {
  for (int64_t n = 0; n < count; n++)
    product({a + n * a_by[0], a_by[1], a_by[2]}, {b + n * b_by[0], b_by[1], b_by[2]}, c + n * rows * columns, rows, columns, depth);
}

// out[count, rows, columns], each turned if `turned`, = diag(outer) [gate > 0] diag(inner) right; gate [count, rows, depth]
void offrl_gated_product(const float* gate, const int64_t* gate_by, const float* outer, const int64_t* outer_by, const float* inner, const int64_t* inner_by,
                         const float* right, const int64_t* right_by, float* out, int64_t turned, int64_t count, int64_t rows, int64_t columns, int64_t depth) {
  for (int64_t n = 0; n < count; n++)
    gated({gate + n * gate_by[0], gate_by[1], gate_by[2]}, outer + n * outer_by[0], outer_by[1], inner + n * inner_by[0], inner_by[1],
          {right + n * right_by[0], right_by[1], right_by[2]}, out + n * rows * columns, turned, rows, columns, depth);
}

// ---- the same for tensors of code by AOTInductor; these functions are torch's stable interface

typedef struct AtenTensorOpaque* Tensor;
int32_t aoti_torch_get_data_ptr(Tensor, void**);
int32_t aoti_torch_get_dim(Tensor, int64_t*);
int32_t aoti_torch_get_size(Tensor, int64_t, int64_t*);
int32_t aoti_torch_get_stride(Tensor, int64_t, int64_t*);
int32_t aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Tensor*);

}  // extern "C"

namespace {

constexpr int32_t FLOAT32 = 6, INT64 = 4, CPU = 0;  // torch's numbers for them

struct Seen {
  const float* data;
  int64_t size[3], by[3];
  Seen(Tensor x, int64_t axes) {
    void* memory;
    aoti_torch_get_data_ptr(x, &memory);
    data = (const float*)memory;
    for (int64_t d = 0; d < axes; d++) {
      aoti_torch_get_size(x, d, &size[d]);
      aoti_torch_get_stride(x, d, &by[d]);
    }
  }
};

float* made(int64_t axes, int64_t count, int64_t rows, int64_t columns, Tensor* result) {
  int64_t sizes[] = {count, rows, columns}, strides[] = {rows * columns, columns, 1};
  void* memory;
  aoti_torch_empty_strided(axes, sizes, strides, FLOAT32, CPU, -1, result);
  aoti_torch_get_data_ptr(*result, &memory);
  return (float*)memory;
}

}  // namespace

extern "C" {

int32_t aoti_torch_cpu_vector_product(Tensor matrix, Tensor vector, Tensor* result) {
  Seen a(matrix, 3), b(vector, 2);
  float* c = made(2, a.size[0], a.size[1], 1, result);
  offrl_vector_product(a.data, a.by, b.data, b.by, c, a.size[0], a.size[1], a.size[2]);
  return 0;
}

int32_t aoti_torch_cpu_product(Tensor left, Tensor right, Tensor* result) {
  Seen a(left, 3), b(right, 3);
  float* c = made(3, a.size[0], a.size[1], b.size[2], result);
  offrl_product(a.data, a.by, b.data, b.by, c, a.size[0], a.size[1], b.size[2], a.size[2]);
  return 0;
}

int32_t aoti_torch_cpu_gated_product(Tensor gate, Tensor outer, Tensor inner, Tensor right, int32_t turned, Tensor* result) {
  Seen a(gate, 3), x(outer, 2), y(inner, 2), b(right, 3);
  int64_t count = a.size[0], rows = a.size[1], columns = b.size[2];
  float* out = turned ? made(3, count, columns, rows, result) : made(3, count, rows, columns, result);
  offrl_gated_product(a.data, a.by, x.data, x.by, y.data, y.by, b.data, b.by, out, turned, count, rows, columns, a.size[2]);
  return 0;
}

// `rng.stream`: result[..., count] of key [...], which has at most two axes
int32_t aoti_torch_cpu_stream(Tensor key, int64_t count, Tensor* result) {
  int64_t axes, sizes[3] = {1, 1, count}, by[2] = {0, 0};
  aoti_torch_get_dim(key, &axes);
  if (axes > 2) return 1;
  for (int64_t d = 0; d < axes; d++) {
    aoti_torch_get_size(key, d, &sizes[2 - axes + d]);
    aoti_torch_get_stride(key, d, &by[2 - axes + d]);
  }
  int64_t strides[] = {sizes[1] * count, count, 1};
  aoti_torch_empty_strided(axes + 1, sizes + 2 - axes, strides + 2 - axes, INT64, CPU, -1, result);
  void *from, *memory;
  aoti_torch_get_data_ptr(key, &from);
  aoti_torch_get_data_ptr(*result, &memory);
  uint64_t* to = (uint64_t*)memory;
  for (int64_t i = 0; i < sizes[0]; i++)
    for (int64_t j = 0; j < sizes[1]; j++) {
      uint64_t x = ((const uint64_t*)from)[i * by[0] + j * by[1]];
      for (int64_t n = 1; n <= count; n++) {
        uint64_t y = x + (uint64_t)n * 0x9E3779B97F4A7C15u;
        y = (y ^ y >> 30) * 0xBF58476D1CE4E5B9u;
        y = (y ^ y >> 27) * 0x94D049BB133111EBu;
        *to++ = y ^ y >> 31;
      }
    }
  return 0;
}

}  // extern "C"
