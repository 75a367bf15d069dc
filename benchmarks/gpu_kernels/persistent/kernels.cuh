// The launches: one persistent kernel that walks over a list of phases, and one kernel per phase.
__device__ __forceinline__ void produce(Shared& s, const Entry* list, int n, unsigned* sync, int flags) {
  unsigned slot = 0, round = 0;
  for (int i = 0; i < n; ++i) {
    const Entry& e = list[i];
    if (!(flags & AHEAD)) bounded(sync, [&] { return peek(&s.position) >= i; });
    if (e.chunks == 0) continue;
    for (int t = blockIdx.x; t < e.tiles; t += gridDim.x) {
      const float* from = e.weights + (size_t)(t / e.row_tiles) * e.chunks * CHUNK;
      for (int c = 0; c < e.chunks; ++c, from += CHUNK) {
        if (round > 0) bounded(sync, [&] { return barrier_try(s.empty + slot, (round - 1) & 1); });
        bulk_copy(s.ring[slot], from, CHUNK * 4, s.full + slot);
        if (++slot == SLOTS) slot = 0, ++round;
      }
    }
  }
}
__device__ __forceinline__ void prepare(Shared& s) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; ++i) barrier_init(s.full + i, 1), barrier_init(s.empty + i, WARPS);
    poke(&s.position, -1);
    barriers_ready();
  }
}
template <class Body>
__device__ __forceinline__ void run(Block& b, const Entry& e) {
#pragma unroll 1
  for (int t = blockIdx.x; t < e.tiles; t += gridDim.x) Body::tile(b, e, t);
}

// Keeps the device busy until the host has launched what is timed.
extern "C" __global__ void delay(u64 nanoseconds) {
  u64 begin = timer();
  while (timer() - begin < nanoseconds) {
  }
}

#ifdef PERSISTENT
extern "C" __global__ void __launch_bounds__(THREADS + 32, MIN_BLOCKS)
    persistent(const Entry* list, int n, int flags, unsigned* counters, u64* trace) {
  SHARED_MEMORY(raw);
  Shared& s = *(Shared*)raw;
  prepare(s);
#pragma unroll 1
  for (int i = threadIdx.x; i < n * (int)(sizeof(Entry) / 16); i += THREADS + 32)
    ((uint4*)s.list)[i] = ((const uint4*)list)[i];
  __syncthreads();
  if (threadIdx.x >= THREADS) {
    if (threadIdx.x == THREADS) produce(s, s.list, n, counters, flags);
    return;
  }
  Block b{s, s.list, counters, flags, 0, 0, 0};
  bool traces = (flags & TRACE) && blockIdx.x == 0 && threadIdx.x == 0;
#pragma unroll 1
  for (int i = 0; i < n; ++i) {
    const Entry& e = s.list[i];
    b.tid = thread();
    if (b.tid == 0) poke(&s.position, i);
    if (traces) trace[i] = cycles();
    switch (e.body) {
#define CASE(number, ...) \
  case number:            \
    run<__VA_ARGS__>(b, e); \
    break;
      BODIES(CASE)
    }
    if (!(flags & TILES)) {  // the grid barrier
      sync();
      if (threadIdx.x == 0) {
        arrive_release(counters);
        wait_count(counters, counters, (unsigned)(i + 1) * gridDim.x);
      }
      sync();
    }
  }
  if (traces) trace[n] = cycles();
  sync();
  if (threadIdx.x == 0) s.last = add_acq_rel(counters + 1) == gridDim.x - 1;
  sync();
  if (s.last) {  // the last block leaves all counters as they were
    if (threadIdx.x < 2) counters[threadIdx.x] = 0;
    if (flags & TILES)
#pragma unroll 1
      for (int i = threadIdx.x; i < n * RANGES; i += THREADS) counters[COUNTERS + i] = 0;
  }
}
#else
#define CHAIN(number, ...)                                                                            \
  extern "C" __global__ void __launch_bounds__(THREADS + 32, MIN_BLOCKS)                              \
      phase_##number(const __grid_constant__ Entry e, int flags, unsigned* counters) {                \
    SHARED_MEMORY(raw);                                                                               \
    Shared& s = *(Shared*)raw;                                                                        \
    launch_dependents();                                                                              \
    prepare(s);                                                                                       \
    __syncthreads();                                                                                  \
    if (threadIdx.x >= THREADS) {                                                                     \
      if (threadIdx.x == THREADS) {                                                                   \
        if (!(flags & AHEAD)) grid_wait();                                                            \
        produce(s, &e, 1, counters, AHEAD);                                                           \
      }                                                                                               \
      return;                                                                                         \
    }                                                                                                 \
    grid_wait();                                                                                      \
    Block b{s, &e, counters, 0, 0, 0, thread()};                                                          \
    run<__VA_ARGS__>(b, e);                                                                           \
  }
BODIES(CHAIN)
#endif
