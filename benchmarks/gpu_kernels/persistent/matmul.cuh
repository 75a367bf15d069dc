// Products on the matrix units: a 1x1 convolution (TAPS 1) or a 3x3 one as implicit GEMM (TAPS 9), TF32, split-K.
// K = TAPS * CIN in SPLIT parts; a tile is BM pixels by BN channels of one part.  PARTIAL: parts are left to a later phase;
// otherwise the last block that ends a part of a tile sums its parts, in their order.
template <int H, int W, int ROWS, int CIN, int COUT, int TAPS, int BM, int BN, int SPLIT, int PARTIAL, int RELU, int TAG>
struct Matmul {
  static constexpr int KC = CHUNK / BN, KT = KC / 8, PART = TAPS * CIN / SPLIT, CHUNKS = PART / KC;
  static constexpr int ROW_TILES = (ROWS + BM - 1) / BM, STAGES = 4, PITCH = KC + 4;
  static constexpr int WM = BM / 16, WN = WARPS / (WM * 2) > KT ? 4 : 2, WK = WARPS / (WM * WN), NP = BN / WN / 16;
  static constexpr int PIECES = (BM * KC / 4 + THREADS - 1) / THREADS, HALO = TAPS == 9 ? W + 1 : 0;
  static_assert(CIN % KC == 0 && PART % KC == 0 && PART * SPLIT == TAPS * CIN && COUT % BN == 0, "sizes");
  static_assert(WM * WN * WK == WARPS && KT % WK == 0 && NP > 0, "warps");
  static_assert(STAGES * BM * PITCH <= 9216 && (WK - 1) * BM * BN <= 9216, "scratch");

  static __device__ __forceinline__ void load(Block& b, const Entry& e, int stage, int m0, int k0) {
    int tap = k0 / CIN, c0 = k0 % CIN, dy = tap / 3 - 1, dx = tap % 3 - 1;
#pragma unroll
    for (int j = 0; j < PIECES; ++j) {
      int i = b.tid + j * THREADS, r = i / (KC / 4), q = i % (KC / 4), p = m0 + r;
      if (i >= BM * KC / 4) break;
      bool ok = p < ROWS;
      int pixel = p;
      if (TAPS == 9) {
        int y = p / W + dy, x = p % W + dx;
        ok = ok && y >= 0 && y < H && x >= 0 && x < W;
        pixel = y * W + x;
      }
      copy16(b.s.scratch + (stage * BM + r) * PITCH + q * 4, ok ? e.in + pixel * CIN + c0 + q * 4 : e.in, ok);
    }
  }

  static __device__ __forceinline__ void multiply(const Block& b, float (&acc)[NP * 2][4], const float* a, const float* w) {
    int lane = b.tid % 32, warp = b.tid / 32, wm = warp % WM, wn = warp / WM % WN, wk = warp / (WM * WN);
    const float* row = a + (wm * 16 + lane % 16) * PITCH + lane / 16 * 4;
#pragma unroll
    for (int i = 0; i < KT / WK; ++i) {
      int kt = wk + i * WK;
      unsigned x[4];
      matrix4(x, row + kt * 8);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = tf32(x[j]);
#pragma unroll
      for (int n = 0; n < NP; ++n) {
        float4 y = *(const float4*)(w + ((kt * (BN / 16) + wn * NP + n) * 32 + lane) * 4);
        mma(acc[n * 2], x, y.x, y.y);
        mma(acc[n * 2 + 1], x, y.z, y.w);
      }
    }
  }

  // Sums over the warps that had different parts of every chunk; the first WM * WN warps have the result.
  static __device__ __forceinline__ void join(Block& b, float (&acc)[NP * 2][4]) {
    int lane = b.tid % 32, warp = b.tid / 32, tile = warp % (WM * WN), wk = warp / (WM * WN);
    constexpr int SIZE = WM * WN * 32 * 4;  // floats of one n8 tile of all warps
    wait_group<0>();
    sync();
    if (wk > 0) {
#pragma unroll
      for (int n = 0; n < NP * 2; ++n)
        store4(b.s.scratch + ((wk - 1) * NP * 2 + n) * SIZE + (tile * 32 + lane) * 4,
               make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]));
    }
    sync();
    if (wk == 0) {
#pragma unroll
      for (int k = 0; k < WK - 1; ++k)
#pragma unroll
        for (int n = 0; n < NP * 2; ++n) {
          float4 v = *(const float4*)(b.s.scratch + (k * NP * 2 + n) * SIZE + (tile * 32 + lane) * 4);
          acc[n][0] += v.x, acc[n][1] += v.y, acc[n][2] += v.z, acc[n][3] += v.w;
        }
    }
  }

  static __device__ __forceinline__ void store(const Block& b, const Entry& e, const float (&acc)[NP * 2][4], int m0, int n0, int split) {
    int lane = b.tid % 32, warp = b.tid / 32;
    if (warp >= WM * WN) return;
#pragma unroll
    for (int n = 0; n < NP * 2; ++n) {
      int c = n0 + warp / WM * (BN / WN) + n * 8 + lane % 4 * 2;
      float b0 = 0.f, b1 = 0.f;
      if (SPLIT == 1) b0 = constant(e.bias + c), b1 = constant(e.bias + c + 1);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int p = m0 + warp % WM * 16 + lane / 4 + h * 8;
        float2 v = make_float2(acc[n][h * 2] + b0, acc[n][h * 2 + 1] + b1);
        if (SPLIT == 1 && RELU) v = make_float2(fmaxf(v.x, 0.f), fmaxf(v.y, 0.f));
        float* to = SPLIT == 1 ? e.out + p * COUT + c : e.partial + (split * ROWS + p) * COUT + c;
        if (p < ROWS) *(float2*)to = v;
      }
    }
  }

  // Split-K: whether this block ended the last part of the tile; it has then written the tile's result.
  static __device__ __forceinline__ bool finish(Block& b, const Entry& e, int m0, int n0, int group) {
    unsigned* counter = b.sync + SPLITS + e.self * GROUPS + group;
    sync();
    if (b.tid == 0) b.s.last = add_acq_rel(counter) == SPLIT - 1;
    sync();
    if (!b.s.last) return false;
    if (b.tid == 0) raise(counter, 0);
#pragma unroll 1
    for (int i = b.tid; i < BM * BN / 4; i += THREADS) {
      int p = m0 + i / (BN / 4), c = n0 + i % (BN / 4) * 4;
      if (p >= ROWS) continue;
      float4 sum = constant4(e.bias + c);
#pragma unroll(TIGHT ? 4 : 8)
      for (int k = 0; k < SPLIT; ++k) sum = add4(sum, load4(e.partial + (k * ROWS + p) * COUT + c));
      store4(e.out + p * COUT + c, RELU ? relu4(sum) : sum);
    }
    return true;
  }

  static __device__ __forceinline__ void tile(Block& b, const Entry& e, int t) {
    int m0 = t % ROW_TILES * BM, part = t / ROW_TILES, split = part % SPLIT, n0 = part / SPLIT * BN;
    wait_operands(b, e, m0 - HALO, m0 + BM + HALO, m0, m0 + BM);
    float acc[NP * 2][4] = {};
#pragma unroll
    for (int c = 0; c < STAGES - 1; ++c) {
      if (c < CHUNKS) load(b, e, c, m0, split * PART + c * KC);
      commit();
    }
#pragma unroll 1
    for (int c = 0; c < CHUNKS; ++c) {
      wait_group<STAGES - 2>();
      const float* w = weights_arrived(b);
      sync();
      if (c + STAGES - 1 < CHUNKS) load(b, e, (c + STAGES - 1) % STAGES, m0, split * PART + (c + STAGES - 1) * KC);
      commit();
      multiply(b, acc, b.s.scratch + c % STAGES * BM * PITCH, w);
      weights_read(b);
    }
    join(b, acc);
    store(b, e, acc, m0, n0, split);
    bool whole = true;
    if (SPLIT > 1 && !PARTIAL) whole = finish(b, e, m0, n0, part / SPLIT * ROW_TILES + t % ROW_TILES);
    if (TAG >= 0 && b.tid == 0) mark(&b.s.tag, TAG);
    if (whole)
      tile_done(b, e, t % ROW_TILES);
    else
      sync();
  }
};
