// What the MXFP4 kernels share: packed weights (mxfp4_packing.py) to register fragments, tensor-core products, activation.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

// Weights are read once: not kept in L1. A load that `wanted` turns off leaves its register alone.
__device__ __forceinline__ void load_words(uint4& v, const uint4* p, bool wanted) {
  asm volatile("{.reg .pred q; setp.ne.u32 q, %5, 0;\n"
               "@q ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(p), "r"((u32)wanted));
}
__device__ __forceinline__ void load_scales(u32& v, const u16* p, bool wanted) {
  u16 r = (u16)v;
  asm volatile("{.reg .pred q; setp.ne.u32 q, %2, 0;\n"
               "@q ld.global.nc.L1::no_allocate.u16 %0, [%1];}" : "+h"(r) : "l"(p), "r"((u32)wanted));
  v = r;
}
__device__ __forceinline__ u32 scaled(u32 bits, u32 scale) {
  u32 r;  // adding -0 changes nothing; a plain bfloat16 product exists from sm_90 only
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(bits), "r"(scale), "r"(0x80008000u));
  return r;
}
__device__ __forceinline__ void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float from_bf16(u16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ u16 to_bf16(float v) {
  u16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}

// One word holds the lane's four fragment registers: two codes each, whose bits lie so that a shift and a mask make a
// bfloat16 pair of value * 2^-126; the scale (2^126 folded in) makes it exact.
__device__ __forceinline__ void fragments(u32 w, u32 even, u32 odd, u32* a) {
  const u32 mask = 0x81C081C0u;
  a[0] = scaled((w << 6) & mask, even);
  a[1] = scaled((w << 2) & mask, odd);
  a[2] = scaled(__funnelshift_r(w, w, 4) & mask, even);
  a[3] = scaled((w & 0x81808180u) | ((w >> 8) & 0x00400040u), odd);
}

// The gated activation of one column, its bias included (null: none).
__device__ __forceinline__ u16 gated(float gate, float up, const u16* bias, int at, float alpha, float limit) {
  if (bias) gate += from_bf16(bias[2 * at]), up += from_bf16(bias[2 * at + 1]);
  if (limit <= 0.f) return to_bf16(up * (gate / (1.f + expf(-gate))));
  gate = fminf(gate, limit), up = fminf(fmaxf(up, -limit), limit);
  return to_bf16((up + 1.f) * (gate / (1.f + expf(-alpha * gate))));
}
