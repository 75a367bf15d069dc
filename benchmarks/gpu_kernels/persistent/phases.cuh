// Phases of a batch-1 network (NHWC, float32), one template per kind of work; a tile is what one block computes at once.
constexpr int WARPS = THREADS / 32;
constexpr int CHUNK = 2048;      // floats of weights that one bulk copy brings
constexpr bool TIGHT = THREADS * MIN_BLOCKS > 256;  // few registers
constexpr int MOST = 64;         // positions of a list
constexpr int RANGES = 128;      // counters of one position
constexpr int GROUPS = 64;       // counters of one position's split-K tiles
constexpr int COUNTERS = 32;     // where they begin, behind the grid barrier's
constexpr int SPLITS = COUNTERS + MOST * RANGES;
constexpr int AHEAD = 1, TILES = 2, TRACE = 4;
constexpr u64 PATIENCE = 2000000000ull;  // nanoseconds until a wait gives up and raises the error flag

struct Entry {  // one position of the list of phases; `after`: the position that wrote `in`, or -1
  const float *in, *side, *weights, *bias;
  float *out, *partial;
  int body, tiles, row_tiles, chunks;
  int ranges, range_rows, target, after;
  int side_after, self, unused0, unused1;
};
struct Shared {
  float ring[SLOTS][CHUNK];
  float scratch[9216];
  Entry list[MOST];
  u64 full[SLOTS], empty[SLOTS];
  float sums[64];
  int position, last, tag;
};
struct Block {
  Shared& s;
  const Entry* list;
  unsigned* sync;  // 0: grid barrier, 1: blocks that have ended, 2: error; then counters of ranges and of splits
  int flags;
  unsigned slot, parity;  // of the next chunk of weights
  int tid;  // read anew for every phase: what follows from it is not kept in registers over all of them
};

template <class Test>
__device__ __forceinline__ void bounded(unsigned* sync, Test test) {
  u64 begin = 0;
  for (unsigned spins = 1; !test(); ++spins) {
    if ((spins & 255) == 0) {
      u64 now = timer();
      if (begin == 0) begin = now;
      if (now - begin > PATIENCE || look(sync + 2) != 0) {
        raise(sync + 2, 1);
        return;
      }
    }
  }
}
__device__ __forceinline__ void wait_count(unsigned* sync, unsigned* c, unsigned target) {
  bounded(sync, [=] { return look(c) >= target; });
}
__device__ __forceinline__ const float* weights_arrived(Block& b) {
  u64* full = b.s.full + b.slot;
  unsigned parity = b.parity;
  bounded(b.sync, [=] { return barrier_try(full, parity); });
  return b.s.ring[b.slot];
}
__device__ __forceinline__ void weights_read(Block& b) {
  __syncwarp();
  if (b.tid % 32 == 0) barrier_arrive(b.s.empty + b.slot);
  if (++b.slot == SLOTS) b.slot = 0, b.parity ^= 1;
}
// Waits for the tiles that wrote these rows of an operand.
__device__ __forceinline__ void wait_rows(Block& b, int after, int first, int end) {
  if (after < 0) return;
  const Entry& p = b.list[after];
  int r0 = max(first, 0) / p.range_rows, r1 = min((end - 1) / p.range_rows, p.ranges - 1);
  r0 = min(r0, r1);
  unsigned* c = b.sync + COUNTERS + after * RANGES;
  for (int r = r0 + b.tid; r <= r1; r += THREADS) wait_count(b.sync, c + r, (unsigned)p.target);
}
__device__ __forceinline__ void wait_operands(Block& b, const Entry& e, int first, int end, int row, int row_end) {
  if (!(b.flags & TILES)) return;
  wait_rows(b, e.after, first, end);
  wait_rows(b, e.side_after, row, row_end);
  sync();
}
__device__ __forceinline__ void tile_done(Block& b, const Entry& e, int range) {
  sync();
  if ((b.flags & TILES) && b.tid == 0) arrive_release(b.sync + COUNTERS + e.self * RANGES + range);
}
__device__ __forceinline__ float4 add4(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float4 fma4(float4 a, float4 b, float4 c) {
  return make_float4(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y), fmaf(a.z, b.z, c.z), fmaf(a.w, b.w, c.w));
}
__device__ __forceinline__ float4 relu4(float4 a) {
  return make_float4(fmaxf(a.x, 0.f), fmaxf(a.y, 0.f), fmaxf(a.z, 0.f), fmaxf(a.w, 0.f));
}
__device__ __forceinline__ void store4(float* p, float4 v) { *(float4*)p = v; }

// Depthwise 3x3, padding 1, bias, ReLU: TY rows of CB channels; the input rows pass through shared memory once.
template <int H, int W, int C, int STRIDE, int CB, int TY, int TAG>
struct Depthwise {
  static constexpr int HO = H / STRIDE, WO = W / STRIDE, ROW_TILES = (HO + TY - 1) / TY, Q = CB / 4;
  static constexpr int ROWS_IN = (TY - 1) * STRIDE + 3;
  static_assert(ROWS_IN * W * CB <= 9216 && C % CB == 0, "tile too large");
  static __device__ __forceinline__ void tile(Block& b, const Entry& e, int t) {
    int y0 = t % ROW_TILES * TY, c0 = t / ROW_TILES * CB, top = y0 * STRIDE - 1;
    wait_operands(b, e, top * W, (top + ROWS_IN) * W, 0, 1);
    for (int i = b.tid; i < ROWS_IN * W * Q; i += THREADS) {
      int y = top + i / (W * Q), x = i / Q % W;
      bool ok = y >= 0 && y < H;
      copy16(b.s.scratch + i * 4, ok ? e.in + (y * W + x) * C + c0 + i % Q * 4 : e.in, ok);
    }
    commit();
    wait_group<0>();
    sync();
#pragma unroll 1
    for (int i = b.tid; i < TY * WO * Q; i += THREADS) {
      int q = i % Q, x = i / Q % WO, y = i / (WO * Q), c = c0 + q * 4;
      float4 sum = constant4(e.bias + 9 * C + c);
#pragma unroll(TIGHT ? 1 : 3)
      for (int ky = 0; ky < 3; ++ky)
#pragma unroll
        for (int kx = 0; kx < 3; ++kx) {
          int xx = x * STRIDE + kx - 1;
          const float* at = b.s.scratch + (((y * STRIDE + ky) * W + xx) * Q + q) * 4;
          float4 filter = constant4(e.bias + (ky * 3 + kx) * C + c);
          if (xx >= 0 && xx < W) sum = fma4(*(const float4*)at, filter, sum);
        }
      if (y0 + y < HO) store4(e.out + ((y0 + y) * WO + x) * C + c, relu4(sum));
    }
    if (TAG >= 0 && b.tid == 0) mark(&b.s.tag, TAG);
    tile_done(b, e, t % ROW_TILES);
  }
};

// Global average pool of P pixels: 16 channels at a time.
template <int P, int C, int TAG>
struct Pool {
  static __device__ __forceinline__ void tile(Block& b, const Entry& e, int t) {
    int lane = b.tid % 32, warp = b.tid / 32, c = t * 16 + lane % 4 * 4;
    wait_operands(b, e, 0, P, 0, 1);
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int p = warp * 8 + lane / 4; p < P; p += WARPS * 8) sum = add4(sum, load4(e.in + p * C + c));
    for (int mask = 4; mask < 32; mask *= 2)
      sum = add4(sum, make_float4(shuffle(sum.x, mask), shuffle(sum.y, mask), shuffle(sum.z, mask), shuffle(sum.w, mask)));
    if (lane < 4) store4(b.s.scratch + warp * 16 + lane * 4, sum);
    sync();
    if (b.tid < 16) {
      float all = 0.f;
      for (int w = 0; w < WARPS; ++w) all += b.s.scratch[w * 16 + b.tid];
      e.out[t * 16 + b.tid] = all * (1.f / P);
    }
    tile_done(b, e, 0);
  }
};

// Layer norm of rows with scale and offset: two rows at a time.
template <int ROWS, int C, int TAG>
struct Norm {
  static constexpr int PER = THREADS / 2, N = (C / 4 + PER - 1) / PER;
  static __device__ __forceinline__ void tile(Block& b, const Entry& e, int t) {
    int half = b.tid / PER, i0 = b.tid % PER, row = t * 2 + half, warp = b.tid / 32;
    wait_operands(b, e, t * 2, t * 2 + 2, 0, 1);
    float4 v[N];
    float sum = 0.f, squares = 0.f;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      int i = i0 + j * PER;
      v[j] = i < C / 4 && row < ROWS ? load4(e.in + row * C + i * 4) : make_float4(0.f, 0.f, 0.f, 0.f);
      sum += (v[j].x + v[j].y) + (v[j].z + v[j].w);
      squares += (v[j].x * v[j].x + v[j].y * v[j].y) + (v[j].z * v[j].z + v[j].w * v[j].w);
    }
    for (int mask = 16; mask > 0; mask /= 2) sum += shuffle(sum, mask), squares += shuffle(squares, mask);
    if (b.tid % 32 == 0) b.s.sums[warp * 2] = sum, b.s.sums[warp * 2 + 1] = squares;
    sync();
    sum = squares = 0.f;
    for (int w = half * (WARPS / 2); w < (half + 1) * (WARPS / 2); ++w) sum += b.s.sums[w * 2], squares += b.s.sums[w * 2 + 1];
    float mean = sum * (1.f / C), scale = rsqrtf(squares * (1.f / C) - mean * mean + 1e-5f);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      int i = i0 + j * PER;
      if (i >= C / 4 || row >= ROWS) continue;
      float4 g = constant4(e.bias + i * 4), o = constant4(e.bias + C + i * 4), a = v[j];
      a = make_float4((a.x - mean) * scale, (a.y - mean) * scale, (a.z - mean) * scale, (a.w - mean) * scale);
      store4(e.out + row * C + i * 4, fma4(a, g, o));
    }
    tile_done(b, e, t);
  }
};

// Residual: ReLU of a sum of two tensors, R rows at a time.
template <int ROWS, int C, int R, int TAG>
struct Add {
  static __device__ __forceinline__ void tile(Block& b, const Entry& e, int t) {
    wait_operands(b, e, t * R, t * R + R, t * R, t * R + R);
    for (int i = b.tid; i < R * C / 4; i += THREADS) {
      int at = t * R * C + i * 4;
      if (at < ROWS * C) store4(e.out + at, relu4(add4(load4(e.in + at), load4(e.side + at))));
    }
    tile_done(b, e, t);
  }
};

// Sum of the partial results of a split-K product, bias, ReLU.
template <int ROWS, int C, int PARTS, int R, int TAG>
struct SumParts {
  static __device__ __forceinline__ void tile(Block& b, const Entry& e, int t) {
    wait_operands(b, e, t * R, t * R + R, 0, 1);
#pragma unroll 1
    for (int i = b.tid; i < R * C / 4; i += THREADS) {
      int at = t * R * C + i * 4;
      if (at >= ROWS * C) continue;
      float4 sum = constant4(e.bias + at % C);
#pragma unroll(TIGHT ? 4 : 8)
      for (int p = 0; p < PARTS; ++p) sum = add4(sum, load4(e.in + p * ROWS * C + at));
      store4(e.out + at, relu4(sum));
    }
    tile_done(b, e, t);
  }
};

// One vector times a matrix: 8 columns at a time; a chunk is [8 columns][256 of K].
template <int K, int N, int TAG>
struct Gemv {
  static constexpr int PARTS = WARPS / 8;
  static __device__ __forceinline__ void tile(Block& b, const Entry& e, int t) {
    int lane = b.tid % 32, warp = b.tid / 32, column = warp % 8, part = warp / 8;
    wait_operands(b, e, 0, 1, 0, 1);
    for (int i = b.tid; i < K / 4; i += THREADS) copy16(b.s.scratch + i * 4, e.in + i * 4, true);
    commit();
    wait_group<0>();
    sync();
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int c = 0; c < K / 256; ++c) {
      const float* w = weights_arrived(b);
      for (int j = part; j < 2; j += PARTS) {
        int k = j * 128 + lane * 4;
        sum = fma4(*(const float4*)(w + column * 256 + k), *(const float4*)(b.s.scratch + c * 256 + k), sum);
      }
      weights_read(b);
    }
    float all = (sum.x + sum.y) + (sum.z + sum.w);
    for (int mask = 16; mask > 0; mask /= 2) all += shuffle(all, mask);
    if (lane == 0) b.s.sums[warp] = all;
    sync();
    if (b.tid < 8) {
      float total = constant(e.bias + t * 8 + b.tid);
      for (int p = 0; p < PARTS; ++p) total += b.s.sums[p * 8 + b.tid];
      e.out[t * 8 + b.tid] = total;
    }
    tile_done(b, e, 0);
  }
};

struct Nothing {
  static __device__ __forceinline__ void tile(Block& b, const Entry& e, int t) { tile_done(b, e, t); }
};
