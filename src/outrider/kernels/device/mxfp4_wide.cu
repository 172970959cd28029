// `project` of mxfp4.cu for experts with many rows: the same sums in the same order, so the same bits.
//
// A block owns 16 weight rows a warp and walks K once for every 8 * COLUMNS activation rows. Those come through
// shared memory, which all its warps read; weights stay in registers. Where the parts of mxfp4.cu meet, sums are added
// to a total. Hopper multiplies with wgmma (weights from registers, activations from shared memory), others with mma.
//
// Columns of x and of `inner` are interleaved: in each 64, place 16 j + 8 h + 2 q + i holds column 16 q + 4 j + 2 h + i
// (q, j < 4; h, i < 2), which is the order in which packed weights meet them (mxfp4_packing.py).
//
// Macros: WARPS, a multiple of 4; COLUMNS tiles of 8 activation rows a pass, 4 or 8; STAGES groups of activations in
// flight; BLOCKS of threads that have to fit on a multiprocessor; PARTS, GATED: as in mxfp4.cu.

#include "mxfp4.cuh"

#define THREADS (32 * WARPS)
#define ROWS (8 * COLUMNS)
#define COPIES (ROWS * 8 / THREADS)
#define WEIGHTS 2  // groups of weights in flight

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy_later(uint4* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from));
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;"); }
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2)); }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Rows of 128 bytes, their 16-byte pieces swizzled by the row's last three bits.
__device__ __forceinline__ u64 matrix(const void* p) {
  return (u64)((shared_address(p) & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}
__device__ __forceinline__ void copies_are_visible() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void settle(float (*c)[4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int n = 0; n < COLUMNS; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[n][i])::"memory");
}
__device__ __forceinline__ void multiply_16(float (*c)[4], const u32* a, u64 b, int add) {
#if COLUMNS == 4
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#endif
#if COLUMNS == 8
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), 
        "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), 
        "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), 
        "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#endif
}
// Starts c = (add ? c : 0) + weights times activations.
__device__ __forceinline__ void multiply(float (*c)[4], u32 (*a)[4], const uint4* activations, bool add, int rows) {
#pragma unroll
  for (int n = 0; n < COLUMNS; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[n][i])::"memory");
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  const u64 b = matrix(activations);
#pragma unroll
  for (int j = 0; j < 4; j++) multiply_16(c, a[j], b + 2 * j, add || j > 0);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

#else

__device__ __forceinline__ void copies_are_visible() {}
__device__ __forceinline__ void settle(float (*c)[4]) {}
__device__ __forceinline__ void multiply(float (*c)[4], u32 (*a)[4], const uint4* activations, bool add, int rows) {
  const int row = threadIdx.x & 7, piece = threadIdx.x >> 3 & 3;
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
    if (!add) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.f;
    if (n * 8 >= rows) continue;
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      u32 b[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                   : "r"(shared_address(activations + (n * 8 + row) * 8 + ((j * 2 + piece) ^ row))));
      mma(c[n], a[j][0], a[j][1], a[j][2], a[j][3], b[0], b[1]);
      mma(c[n], a[j + 1][0], a[j + 1][1], a[j + 1][2], a[j + 1][3], b[2], b[3]);
    }
  }
}

#endif

struct Ahead {  // weights of the next groups
  const uint4* words;
  const u16* scales;
  uint4 word[WEIGHTS];
  u32 scale[WEIGHTS];
  __device__ __forceinline__ void load(int i, int group, int groups) {
    load_words(word[i], words + group * 32, group < groups);
    load_scales(scale[i], scales + group * 16, group < groups);
  }
  // Fragments of `group`; its registers take the group behind those in flight.
  __device__ __forceinline__ void take(u32 (*a)[4], int group, int groups) {
    const u32 even = __byte_perm(scale[0], 0, 0x4040) << 7, odd = __byte_perm(scale[0], 0, 0x4141) << 7;
    fragments(word[0].x, even, odd, a[0]);
    fragments(word[0].y, even, odd, a[1]);
    fragments(word[0].z, even, odd, a[2]);
    fragments(word[0].w, even, odd, a[3]);
#pragma unroll
    for (int i = 0; i < WEIGHTS - 1; i++) word[i] = word[i + 1], scale[i] = scale[i + 1];
    load(WEIGHTS - 1, group + WEIGHTS, groups);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
project_wide(const u16* x, void* out, const u64* address, const int* start, const int* pairs, const int* bounds,
             int N, int groups, int x_divisor, int x_stride, int out_stride, int words_at, int scales_at, int bias_at,
             float alpha, float limit) {
  // 16-byte piece p of row n lies at n * 8 + (p ^ n % 8).
  __shared__ __align__(1024) uint4 activations[STAGES][ROWS * 8];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, of_row = lane >> 2, quarter = lane & 3;
  const int tiles = N / 16, blocks = (tiles + WARPS - 1) / WARPS, begin = bounds[0], items = (bounds[1] - begin) * blocks;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int entry = begin + item / blocks, tile = item % blocks * WARPS + warp;
    const char* record = (const char*)address[entry];
    const int first = start[entry], rows = start[entry + 1] - first;
    const u16* bias = bias_at < 0 ? nullptr : (const u16*)(record + bias_at);
    const long unit = (long)min(tile, tiles - 1) * groups;  // a tile that does not exist is computed and not stored
    // Blocks of one x share an expert's rows, so that one with many does not keep a single block long after all others.
    for (int done = blockIdx.y * ROWS; done < rows; done += gridDim.y * ROWS) {
      Ahead weights = {(const uint4*)(record + words_at) + unit * 32 + lane,
                       (const u16*)(record + scales_at) + unit * 16 + of_row * 2 + (quarter >> 1)};
#pragma unroll
      for (int i = 0; i < WEIGHTS; i++) {
        weights.word[i] = make_uint4(0, 0, 0, 0), weights.scale[i] = 0;
        weights.load(i, i, groups);
      }
      const u16* from[COPIES];
      int to[COPIES];
      bool exists[COPIES];
#pragma unroll
      for (int i = 0; i < COPIES; i++) {
        const int at = i * THREADS + threadIdx.x, n = at >> 3, piece = at & 7;
        from[i] = x + (long)(pairs[first + min(done + n, rows - 1)] / x_divisor) * x_stride + piece * 8;
        to[i] = n * 8 + (piece ^ (n & 7));
        exists[i] = done + n < rows;  // what lies in place of other rows is multiplied and not stored
      }
      __syncthreads();  // the last pass has been read
#pragma unroll
      for (int s = 0; s < STAGES - 1; s++) {
        if (s < groups)
#pragma unroll
          for (int i = 0; i < COPIES; i++)
            if (exists[i]) copy_later(&activations[s][to[i]], from[i] + s * 64);
        end_copies();
      }
      float total[COLUMNS][4] = {}, c[COLUMNS][4] = {};
      u32 a[2][4][4];
      int part = 1;
      bool add = false;
      auto step = [&](int turn, int g) {
        weights.take(a[turn], g, groups);  // while the last group is multiplied
        settle(c);
        if (g == groups * part / PARTS) {
          part++, add = false;
#pragma unroll
          for (int n = 0; n < COLUMNS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) total[n][i] += c[n][i];
        }
        wait_for_copies();
        copies_are_visible();
        __syncthreads();
        const int ahead = g + STAGES - 1;
        if (ahead < groups)
#pragma unroll
          for (int i = 0; i < COPIES; i++)
            if (exists[i]) copy_later(&activations[ahead % STAGES][to[i]], from[i] + ahead * 64);
        end_copies();
        multiply(c, a[turn], activations[g % STAGES], add, rows - done);
        add = true;
      };
      for (int g = 0; g < groups; g += 2) {
        step(0, g);
        if (g + 1 < groups) step(1, g + 1);
      }
      settle(c);
#pragma unroll
      for (int n = 0; n < COLUMNS; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int row = done + n * 8 + quarter * 2 + i;
          if (row >= rows || tile >= tiles) continue;
          const long pair = pairs[first + row];
          const float upper = total[n][i] + c[n][i], lower = total[n][i + 2] + c[n][i + 2];
          if (GATED) {
            const int at = tile * 8 + of_row, in = at & 63;
            const int place = (at & ~63) + (in >> 2 & 3) * 16 + (in >> 1 & 1) * 8 + (in >> 4) * 2 + (in & 1);
            ((u16*)out)[pair * out_stride + place] = gated(upper, lower, bias, at, alpha, limit);
          } else {
            const int at = tile * 16 + of_row;
            float* to = (float*)out + pair * out_stride + at;
            to[0] = bias ? upper + from_bf16(bias[at]) : upper;
            to[8] = bias ? lower + from_bf16(bias[at + 8]) : lower;
          }
        }
    }
  }
}
