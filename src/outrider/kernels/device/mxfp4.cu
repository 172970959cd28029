// Expert projections over MXFP4 weights that are packed as tensor-core register fragments (see mxfp4_packing.py).
//
// A warp owns one tile of 16 weight rows and a fixed part of K; the warps of a tile add their sums in order through
// shared memory. Activations are the n side of mma.m16n8k16, so rows never meet and a row's bits do not depend on
// which rows are beside it. Weights may lie in device memory or in mapped host memory.
//
// Macros: TILES weight tiles a block, PARTS parts of K, DEPTH groups of 64 in flight a warp, COLUMNS most tiles of 8
// activation rows a pass, GATED 1: gate, up and activation; 0: plain with bias.

#include "mxfp4.cuh"

struct Weights {
  const uint4* words;  // this lane's, a step of 32 to the next group
  const u16* scales;   // a step of 16
  int groups;
};

// One group of 64 columns: T tiles of 8 activation rows, with this lane's 16 columns at row[t].
template <int T>
__device__ __forceinline__ void multiply_group(uint4 v, u32 s, const uint4* const* row, int ahead, float (*c)[4]) {
  const u32 even = __byte_perm(s, 0, 0x4040) << 7, odd = __byte_perm(s, 0, 0x4141) << 7;
  uint4 b[T][2];
#pragma unroll
  for (int t = 0; t < T; t++) {
    b[t][0] = __ldg(row[t] + ahead * 8);
    b[t][1] = __ldg(row[t] + ahead * 8 + 1);
  }
  u32 a[4];
  fragments(v.x, even, odd, a);
#pragma unroll
  for (int t = 0; t < T; t++) mma(c[t], a[0], a[1], a[2], a[3], b[t][0].x, b[t][0].y);
  fragments(v.y, even, odd, a);
#pragma unroll
  for (int t = 0; t < T; t++) mma(c[t], a[0], a[1], a[2], a[3], b[t][0].z, b[t][0].w);
  fragments(v.z, even, odd, a);
#pragma unroll
  for (int t = 0; t < T; t++) mma(c[t], a[0], a[1], a[2], a[3], b[t][1].x, b[t][1].y);
  fragments(v.w, even, odd, a);
#pragma unroll
  for (int t = 0; t < T; t++) mma(c[t], a[0], a[1], a[2], a[3], b[t][1].z, b[t][1].w);
}

// Adds the groups of `w`, the first of them at column `column`, to c[t], for rows `done` .. of an expert.
template <int T>
__device__ __forceinline__ void multiply(Weights w, const u16* x, const int* pairs, int done, int rows, int x_divisor,
                                         int x_stride, int column, float (*c)[4]) {
  const int lane = threadIdx.x & 31;
  uint4 word[DEPTH];
  u32 scale[DEPTH];
#pragma unroll
  for (int i = 0; i < DEPTH; i++) {
    word[i] = make_uint4(0, 0, 0, 0), scale[i] = 0;
    load_words(word[i], w.words + i * 32, i < w.groups);
    load_scales(scale[i], w.scales + i * 16, i < w.groups);
  }
  const uint4* row[T];
#pragma unroll
  for (int t = 0; t < T; t++) {  // rows that do not exist repeat the last one, and are not stored
    const int pair = pairs[min(done + t * 8 + (lane >> 2), rows - 1)];
    row[t] = (const uint4*)(x + (long)(pair / x_divisor) * x_stride + column + (lane & 3) * 16);
  }
  for (; w.groups >= DEPTH; w.groups -= DEPTH) {
    w.words += DEPTH * 32, w.scales += DEPTH * 16;
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      const uint4 v = word[i];
      const u32 s = scale[i];
      load_words(word[i], w.words + i * 32, i + DEPTH < w.groups);
      load_scales(scale[i], w.scales + i * 16, i + DEPTH < w.groups);
      multiply_group<T>(v, s, row, i, c);
    }
#pragma unroll
    for (int t = 0; t < T; t++) row[t] += DEPTH * 8;
  }
#pragma unroll
  for (int i = 0; i < DEPTH - 1; i++)
    if (i < w.groups) multiply_group<T>(word[i], scale[i], row, i, c);
}

extern "C" __global__ void __launch_bounds__(32 * TILES * PARTS)
project(const u16* x, void* out, const u64* address, const int* start, const int* pairs, const int* bounds,
        int N, int groups, int x_divisor, int x_stride, int out_stride, int words_at, int scales_at, int bias_at, float alpha, float limit) {
  extern __shared__ float sums[];  // [TILES * PARTS][COLUMNS][16][8]
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, tile_in = warp % TILES, part = warp / TILES;
  const int blocks = N / 16 / TILES, group = groups * part / PARTS;
  const int begin = bounds[0], items = (bounds[1] - begin) * blocks;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int entry = begin + item / blocks, block = item % blocks, tile = block * TILES + tile_in;
    const char* record = (const char*)address[entry];
    const int first = start[entry], rows = start[entry + 1] - first;
    const long unit = (long)tile * groups + group;
    const Weights w = {(const uint4*)(record + words_at) + unit * 32 + lane,
                       (const u16*)(record + scales_at) + unit * 16 + (lane >> 2) * 2 + ((lane & 3) >> 1),
                       groups * (part + 1) / PARTS - group};
    const u16* bias = bias_at < 0 ? nullptr : (const u16*)(record + bias_at);
    for (int done = 0; done < rows; done += 8 * COLUMNS) {
      const int tiles = min(COLUMNS, (rows - done + 7) / 8);
      float c[COLUMNS][4] = {};
      const int* own = pairs + first;
      if (COLUMNS == 1 || tiles == 1) multiply<1>(w, x, own, done, rows, x_divisor, x_stride, group * 64, c);
      else if (COLUMNS == 2 || tiles == 2)
        multiply<COLUMNS < 2 ? 1 : 2>(w, x, own, done, rows, x_divisor, x_stride, group * 64, c);
      else multiply<COLUMNS>(w, x, own, done, rows, x_divisor, x_stride, group * 64, c);
      float* mine = sums + warp * COLUMNS * 128 + (lane >> 2) * 8 + (lane & 3) * 2;
#pragma unroll
      for (int t = 0; t < COLUMNS; t++)
        if (t < tiles) {
          *(float2*)(mine + t * 128) = make_float2(c[t][0], c[t][1]);
          *(float2*)(mine + t * 128 + 64) = make_float2(c[t][2], c[t][3]);
        }
      __syncthreads();
      const int each = GATED ? 64 : 128;
      for (int i = threadIdx.x; i < TILES * tiles * each; i += 32 * TILES * PARTS) {
        const int t = i / each % tiles, of = i / each / tiles, n = i % 8, m = i % each / 8;
        if (done + t * 8 + n >= rows) continue;
        const long pair = pairs[first + done + t * 8 + n];
        const float* p = sums + (of * COLUMNS + t) * 128 + m * 8 + n;
        float value = 0.f, up = 0.f;
        for (int k = 0; k < PARTS; k++) {
          value += p[k * TILES * COLUMNS * 128];
          if (GATED) up += p[k * TILES * COLUMNS * 128 + 64];
        }
        const int at = (block * TILES + of) * (GATED ? 8 : 16) + m;
        if (GATED) {
          ((u16*)out)[pair * out_stride + at] = gated(value, up, bias, at, alpha, limit);
        } else {
          ((float*)out)[pair * out_stride + at] = bias ? value + from_bf16(bias[at]) : value;
        }
      }
      __syncthreads();
    }
  }
}
