// The instructions of benchmarks/gpu_kernels/persistent/primitives.cuh on a CPU: every thread of every block is a
// coroutine; barriers, shuffles and matrix products wait for their warp or block.  Asynchronous copies arrive as late
// as they may, or at once, so that a missing wait gives wrong results.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

typedef unsigned long long u64;
using std::max;
using std::min;
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define SHARED_MEMORY(name) unsigned char* name = host::shared()
struct float4 {
  float x, y, z, w;
};
struct float2 {
  float x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }

namespace host {
constexpr int STACK = 32768, LANES = 32, ALL = THREADS + LANES;
struct Meeting {  // of `members` threads
  int arrived = 0;
  unsigned round = 0;
};
struct Warp {
  Meeting meeting;
  float value[LANES], right[LANES][2];
  const float* row[LANES];
  unsigned left[LANES][4];
};
struct Copy {
  void* to;
  const void* from;
  unsigned bytes;
  u64* barrier;
};
struct Piece {
  void* to;
  const float* from;
  bool ok;
};
struct Blk {
  int number;
  std::vector<unsigned char> memory;
  Warp warps[ALL / LANES];
  Meeting all, computing;
  std::deque<Copy> copies;
};
struct Thread {
  ucontext_t context;
  int number;
  Blk* block;
  bool ended = false;
  std::vector<std::vector<Piece>> groups = std::vector<std::vector<Piece>>(1);  // the last one is open
};
struct Index {
  int x;
};
inline Thread* current;
inline ucontext_t scheduler;
inline int grid;
inline u64 now;
inline std::function<void()> kernel;

inline void give_way() { swapcontext(&current->context, &scheduler); }
inline void meet(Meeting& m, int members) {
  unsigned round = m.round;
  if (++m.arrived == members)
    m.arrived = 0, ++m.round;
  else
    while (m.round == round) give_way();
}
inline Warp& warp() { return current->block->warps[current->number / LANES]; }
inline int lane() { return current->number % LANES; }
inline void meet_warp() { meet(warp().meeting, LANES); }
inline unsigned char* shared() {
  uintptr_t at = (uintptr_t)current->block->memory.data();
  return (unsigned char*)((at + 127) / 128 * 128);
}
inline void require(bool holds) {
  if (!holds) std::abort();
}
inline float as_float(unsigned v) {
  float f;
  std::memcpy(&f, &v, 4);
  return f;
}
inline void body() {
  kernel();
  current->ended = true;
  give_way();
}
inline void launch(int blocks, int bytes, std::function<void()> work) {
  grid = blocks, kernel = std::move(work);
  std::vector<Blk> made(blocks);
  std::vector<Thread> threads((size_t)blocks * ALL);
  std::vector<char> stacks(threads.size() * STACK);
  for (int k = 0; k < blocks; ++k) made[k].number = k, made[k].memory.assign(bytes + 128, 0xff);
  for (size_t k = 0; k < threads.size(); ++k) {
    Thread& t = threads[k];
    t.number = k % ALL, t.block = &made[k / ALL];
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = &stacks[k * STACK];
    t.context.uc_stack.ss_size = STACK;
    t.context.uc_link = nullptr;
    makecontext(&t.context, body, 0);
  }
  for (bool any = true; any;) {
    any = false;
    for (Thread& t : threads)
      if (!t.ended) any = true, current = &t, swapcontext(&scheduler, &t.context);
  }
  for (Blk& b : made) require(b.copies.empty());
}
}  // namespace host

#define threadIdx (host::Index{host::current->number})
#define blockIdx (host::Index{host::current->block->number})
#define gridDim (host::Index{host::grid})
inline void __syncwarp() { host::meet_warp(); }
inline void __syncthreads() { host::meet(host::current->block->all, host::ALL); }
inline void sync() { host::meet(host::current->block->computing, THREADS); }
inline int thread() { return threadIdx.x; }
inline float shuffle(float v, int mask) {
  host::Warp& w = host::warp();
  w.value[host::lane()] = v;
  host::meet_warp();
  float found = w.value[host::lane() ^ mask];
  host::meet_warp();
  return found;
}
extern "C" {
u64 step = 100;  // nanoseconds that pass at every look at the clock
}
inline u64 timer() { return host::now += step; }
inline u64 cycles() { return host::now += 100; }
inline void grid_wait() {}
inline void launch_dependents() {}
inline void arrive_release(unsigned* c) { ++*c; }
inline unsigned look(const unsigned* c) {
  host::give_way();
  return *c;
}
inline unsigned add_acq_rel(unsigned* c) { return (*c)++; }
inline void raise(unsigned* c, unsigned v) { *c = v; }

// A barrier: phase in bit 63, expected arrivals in bits 16 to 31, those still missing below.
inline void barrier_init(u64* b, int count) { *b = (u64)count | (u64)count << 16; }
inline void barriers_ready() {}
inline void barrier_arrive(u64* b) {
  u64 missing = *b & 0xffff, count = *b >> 16 & 0xffff;
  host::require(missing > 0);
  *b = missing > 1 ? *b - 1 : ((*b >> 63 ^ 1) << 63 | count << 16 | count);
}
inline void arrive_copy(const host::Copy& c) {
  std::memcpy(c.to, c.from, c.bytes);
  barrier_arrive(c.barrier);
}
inline bool barrier_try(u64* b, unsigned parity) {
  auto& copies = host::current->block->copies;
  auto at = std::find_if(copies.begin(), copies.end(), [=](const host::Copy& c) { return c.barrier == b; });
  if (at != copies.end()) arrive_copy(*at), copies.erase(at);
  bool done = *b >> 63 != (parity & 1);
  if (!done) host::give_way();
  return done;
}
inline void bulk_copy(void* to, const void* from, unsigned bytes, u64* b) {
  host::require((uintptr_t)from % 16 == 0 && (uintptr_t)to % 16 == 0 && bytes % 16 == 0);
  std::memset(to, 0x7f, bytes);
  if (host::now++ % 2)
    arrive_copy({to, from, bytes, b});
  else
    host::current->block->copies.push_back({to, from, bytes, b});
}
inline void copy16(void* to, const float* from, bool ok) {
  host::require((uintptr_t)from % 16 == 0 && (uintptr_t)to % 16 == 0);
  host::current->groups.back().push_back({to, from, ok});
}
inline void commit() { host::current->groups.emplace_back(); }
template <int N>
inline void wait_group() {
  static const float zeros[4] = {};
  auto& groups = host::current->groups;
  while ((int)groups.size() - 1 > N) {
    for (const host::Piece& p : groups.front()) std::memcpy(p.to, p.ok ? p.from : zeros, 16);
    groups.erase(groups.begin());
  }
}
inline int peek(const int* p) {
  host::give_way();
  return *p;
}
inline void poke(int* p, int v) { *p = v; }
inline float4 load4(const float* p) { return *(const float4*)p; }
inline float2 load2(const float* p) { return *(const float2*)p; }
inline float4 constant4(const float* p) { return *(const float4*)p; }
inline float constant(const float* p) { return *p; }

inline void matrix4(unsigned (&r)[4], const float* p) {
  host::Warp& w = host::warp();
  int lane = host::lane();
  host::require((uintptr_t)p % 16 == 0);
  w.row[lane] = p;
  host::meet_warp();
  for (int k = 0; k < 4; ++k) std::memcpy(&r[k], w.row[k * 8 + lane / 4] + lane % 4, 4);
  host::meet_warp();
}
inline unsigned tf32(unsigned v) { return (v + 0x1000u) & 0xffffe000u; }
inline void mma(float (&d)[4], const unsigned (&a)[4], float b0, float b1) {
  host::Warp& w = host::warp();
  int lane = host::lane();
  std::memcpy(w.left[lane], a, sizeof a);
  w.right[lane][0] = b0, w.right[lane][1] = b1;
  host::meet_warp();
  for (int k = 0; k < 32; ++k) {
    int i = k / 8, term = k % 8, row = lane / 4, column = lane % 4 * 2 + i % 2;
    d[i] += host::as_float(w.left[row * 4 + term % 4][i / 2 + term / 4 * 2]) * w.right[column * 4 + term % 4][term / 4];
  }
  host::meet_warp();
}
inline void mark(int* p, int number) { *p = number; }
