// Runs jcuts' CPU kernels from XLA:CPU through the typed FFI.
//
// A kernel is `void k(void** buffers, int64 tile_begin, int64 tile_end, void* scratch)` (docs/architecture.md, "Kernel
// ABI").  HLO names it by content hash; the instantiate stage resolves the hash once per executable, the execute stage
// only gathers pointers and hands out tiles.
//
// Tiles run on XLA's own intra-op pool.  The calling thread takes tiles as well, and waits only for tiles that another
// thread has already begun: a queued task that has not started is never waited for, because the pool's threads may all
// be callers themselves (that would be a deadlock).  Such a task finds no tile left when it starts at last, so it
// touches nothing but its reference-counted Job.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jcuts {

using Kernel = void (*)(void** buffers, int64_t tile_begin, int64_t tile_end, void* scratch);
// Returns non-zero when it has registered the digest.
using Resolver = int (*)(const char* digest);

constexpr int64_t kAlign = 64;
// Work is handed out in chunks: about this many per thread keeps the tail short and the shared counter cool.
constexpr int64_t kChunksPerThread = 8;

inline int64_t Chunk(int64_t tiles, int64_t threads) {
  return std::max<int64_t>(1, tiles / (threads * kChunksPerThread));
}

inline int64_t RoundUp(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

inline char* AlignUp(void* pointer) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  return reinterpret_cast<char*>((address + kAlign - 1) / kAlign * kAlign);
}

// ---------------------------------------------------------------------------------------------------------------------
// Floating-point mode: rounding and denormal handling belong to the thread, and XLA's pool threads may differ from the
// caller's.  A tile must give the same bits wherever it runs.

#if defined(__x86_64__)
using FpMode = uint32_t;
inline FpMode GetFpMode() { return _mm_getcsr(); }
inline void SetFpMode(FpMode mode) { _mm_setcsr(mode); }
constexpr FpMode kControlBits = 0xFFC0;  // the low six bits are sticky status flags, not modes
#elif defined(__aarch64__)
using FpMode = uint64_t;
inline FpMode GetFpMode() {
  FpMode mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
inline void SetFpMode(FpMode mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
constexpr FpMode kControlBits = ~FpMode{0};
#else
using FpMode = uint32_t;
inline FpMode GetFpMode() { return 0; }
inline void SetFpMode(FpMode) {}
constexpr FpMode kControlBits = 0;
#endif

class FpModeScope {
 public:
  explicit FpModeScope(FpMode wanted) : saved_(GetFpMode()) {
    changed_ = ((saved_ ^ wanted) & kControlBits) != 0;
    if (changed_) SetFpMode((saved_ & ~kControlBits) | (wanted & kControlBits));
  }
  ~FpModeScope() {
    if (changed_) SetFpMode(saved_);
  }
  FpModeScope(const FpModeScope&) = delete;
  FpModeScope& operator=(const FpModeScope&) = delete;

 private:
  FpMode saved_;
  bool changed_;
};

// Waits politely: spins for about the length of a chunk (tens of microseconds), then yields, then sleeps, so that an
// oversubscribed machine gets its core back.
class Backoff {
 public:
  void Pause() {
    ++count_;
    if (count_ < 2000) {
#if defined(__x86_64__)
      _mm_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    } else if (count_ < 2500) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

 private:
  int count_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------------
// The table: digest -> function pointer.  Read at instantiation only, never while executing.

class Table {
 public:
  void Put(const char* digest, Kernel kernel) {
    std::unique_lock lock(mutex_);
    kernels_[digest] = kernel;
  }
  bool Erase(const char* digest) {
    std::unique_lock lock(mutex_);
    return kernels_.erase(digest) != 0;
  }
  Kernel Find(const std::string& digest) const {
    std::shared_lock lock(mutex_);
    auto found = kernels_.find(digest);
    return found == kernels_.end() ? nullptr : found->second;
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<std::string, Kernel> kernels_;
};

// Leaked on purpose: executables may be destroyed after static destructors have run.
Table& GetTable() {
  static Table* table = new Table;
  return *table;
}

std::atomic<Resolver> g_resolver{nullptr};

Kernel Resolve(const std::string& digest) {
  if (Kernel kernel = GetTable().Find(digest)) return kernel;
  // The resolver takes the Python lock: no lock of ours may be held here.
  Resolver resolver = g_resolver.load(std::memory_order_acquire);
  if (resolver == nullptr || resolver(digest.c_str()) == 0) return nullptr;
  return GetTable().Find(digest);
}

// ---------------------------------------------------------------------------------------------------------------------
// One launch of a kernel on several threads.

class Job {
 public:
  std::vector<void*> buffers;  // keeps its capacity from launch to launch
  Kernel kernel = nullptr;
  int64_t tiles = 0;
  int64_t chunk = 1;
  char* scratch = nullptr;
  int64_t scratch_stride = 0;
  int64_t slots = 1;
  FpMode fp_mode = 0;

  alignas(kAlign) std::atomic<int64_t> next{0};  // first tile that nobody has taken
  std::atomic<int64_t> slot{0};                  // next free scratch slot
  alignas(kAlign) std::atomic<int64_t> done{0};  // tiles finished
  std::atomic<int64_t> refs{1};

  void Reset() {
    next.store(0, std::memory_order_relaxed);
    slot.store(0, std::memory_order_relaxed);
    done.store(0, std::memory_order_relaxed);
  }

  // Takes chunks until none is left.
  void Work() {
    int64_t mine = -1;
    for (;;) {
      int64_t begin = next.load(std::memory_order_relaxed);
      if (begin >= tiles) return;
      if (mine < 0) {
        mine = slot.fetch_add(1, std::memory_order_relaxed);
        if (mine >= slots) return;
      }
      begin = next.fetch_add(chunk, std::memory_order_acq_rel);
      if (begin >= tiles) return;
      int64_t end = std::min(begin + chunk, tiles);
      kernel(buffers.data(), begin, end, scratch == nullptr ? nullptr : scratch + mine * scratch_stride);
      done.fetch_add(end - begin, std::memory_order_release);
    }
  }

  void WaitForBegunTiles() const {
    Backoff backoff;
    while (done.load(std::memory_order_acquire) < tiles) backoff.Pause();
  }

  void Unref() {
    if (refs.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
};

// A thread launches again and again: its last Job is used once more unless a late task still holds it.
struct JobCache {
  Job* job = nullptr;
  ~JobCache() {
    if (job != nullptr) job->Unref();
  }
  Job* Take() {
    Job* mine = job;
    job = nullptr;
    if (mine != nullptr && mine->refs.load(std::memory_order_acquire) != 1) {
      mine->Unref();
      mine = nullptr;
    }
    if (mine == nullptr) mine = new Job;
    mine->Reset();
    return mine;
  }
  void Give(Job* mine) {
    if (job == nullptr) {
      job = mine;
    } else {
      mine->Unref();
    }
  }
};

thread_local JobCache t_jobs;

// ---------------------------------------------------------------------------------------------------------------------
// FFI stages.

struct LaunchState {
  static ffi::TypeId id;
  Kernel kernel;
  int64_t tiles;
  int64_t scratch_stride;  // 0: the call has no scratch result
  int64_t slots;
  int64_t num_outputs;
};

ffi::TypeId LaunchState::id = {};
ffi::TypeInfo launch_state_info = ffi::MakeTypeInfo<LaunchState>();

static ffi::Error Unknown(const std::string& digest) {
  return ffi::Error(
      ffi::ErrorCode::kNotFound,
      "jcuts kernel " + digest +
          " is not known to this process and is not in its object cache. The executable was compiled by another "
          "process, machine or jcuts version: import jcuts with the same JCUTS_CACHE_DIR before loading it, or "
          "clear JAX's persistent compilation cache and compile again.");
}

static ffi::ErrorOr<std::unique_ptr<LaunchState>> Instantiate(std::string_view digest, int64_t num_outputs,
                                                              int64_t scratch_bytes, int64_t slots, int64_t tiles) {
  std::string name(digest);
  if (tiles < 1 || slots < 1 || scratch_bytes < 0 || num_outputs < 1) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "jcuts kernel " + name + ": impossible attributes tiles=" + std::to_string(tiles) +
        " slots=" + std::to_string(slots) + " scratch_bytes=" + std::to_string(scratch_bytes) +
        " num_outputs=" + std::to_string(num_outputs)));
  }
  Kernel kernel = Resolve(name);
  if (kernel == nullptr) {
    return ffi::Unexpected(Unknown(name));
  }
  auto state = std::make_unique<LaunchState>();
  state->kernel = kernel;
  state->tiles = tiles;
  state->scratch_stride = RoundUp(scratch_bytes);
  state->slots = slots;
  state->num_outputs = num_outputs;
  return ffi::ErrorOr<std::unique_ptr<LaunchState>>(std::move(state));
}

// Threads of a launch, the caller's among them. Asking the pool for its size costs a call: not for one tile.
static int64_t Threads(int64_t tiles, int64_t slots, ffi::ThreadPool& pool) {
  return tiles == 1 || slots == 1 ? 1 : std::min({pool.num_threads(), tiles, slots});
}

// Runs all tiles of a kernel on the calling thread and at most `slots` - 1 of the pool's.  `gather` writes the pointers
// of its `count` buffers.
template <typename Gather>
static void RunTiles(Kernel kernel, int64_t tiles, int64_t slots, char* scratch, int64_t scratch_stride, size_t count,
                     const Gather& gather, ffi::ThreadPool& pool) {
  int64_t threads = Threads(tiles, slots, pool);
  if (threads <= 1) {
    constexpr size_t kInline = 64;
    void* few[kInline];
    std::vector<void*> many;
    void** buffers = few;
    if (count > kInline) {
      many.resize(count);
      buffers = many.data();
    }
    gather(buffers);
    kernel(buffers, 0, tiles, scratch);
    return;
  }

  Job* job = t_jobs.Take();
  job->buffers.resize(count);
  gather(job->buffers.data());
  job->kernel = kernel;
  job->tiles = tiles;
  job->chunk = Chunk(tiles, threads);
  job->scratch = scratch;
  job->scratch_stride = scratch_stride;
  job->slots = slots;
  job->fp_mode = GetFpMode();
  for (int64_t i = 1; i < threads; ++i) {
    job->refs.fetch_add(1, std::memory_order_relaxed);
    pool.Schedule([job] {
      if (job->next.load(std::memory_order_relaxed) < job->tiles) {
        FpModeScope scope(job->fp_mode);
        job->Work();
      }
      job->Unref();
    });
  }
  job->Work();
  job->WaitForBegunTiles();
  t_jobs.Give(job);
}

static ffi::Error Launch(const LaunchState& state, ffi::ThreadPool& pool, const ffi::RemainingArgs& args,
                         const ffi::RemainingRets& rets) {
  size_t results = static_cast<size_t>(state.num_outputs);
  size_t expected = results + (state.scratch_stride > 0 ? 1 : 0);
  if (rets.size() != expected) {
    return ffi::Error::InvalidArgument("jcuts launch: expected " + std::to_string(expected) + " result buffers, got " +
                                       std::to_string(rets.size()));
  }
  auto gather = [&](void** out) {
    for (size_t i = 0; i < args.size(); ++i) *out++ = args.get<ffi::AnyBuffer>(i).value().untyped_data();
    for (size_t i = 0; i < results; ++i) *out++ = rets.get<ffi::AnyBuffer>(i).value()->untyped_data();
  };
  char* scratch = nullptr;
  if (state.scratch_stride > 0) scratch = AlignUp(rets.get<ffi::AnyBuffer>(results).value()->untyped_data());
  RunTiles(state.kernel, state.tiles, state.slots, scratch, state.scratch_stride, args.size() + results, gather, pool);
  return ffi::Error::Success();
}

static ffi::Error Execute(LaunchState* state, ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  try {
    return Launch(*state, pool, args, rets);
  } catch (const std::exception& error) {  // out of memory: nothing may unwind into XLA
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string("jcuts launch: ") + error.what());
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Several kernels in one call.  Values that only these kernels read lie in an arena that outlives the call: XLA's
// temporary buffers beyond malloc's threshold are mapped anew in every call, a page fault per 4 KiB.

// Arenas of all chains of the process, last in, first out.  The chains of a program run one after the other, and each
// writes to what the one before has left in the caches: with an arena per chain, a network of sixty would go through
// more memory than the last-level cache holds.
class ArenaPool {
 public:
  struct Arena {
    char* data = nullptr;
    int64_t bytes = 0;
  };

  // Says that a chain with so many bytes exists; arenas larger than any chain needs are freed.
  void Add(int64_t bytes) {
    std::lock_guard lock(mutex_);
    needed_.insert(bytes);
  }
  void Remove(int64_t bytes) {
    std::lock_guard lock(mutex_);
    needed_.erase(needed_.find(bytes));
    auto too_large = [this](const Arena& arena) {
      if (!TooLarge(arena)) return false;
      std::free(arena.data);
      return true;
    };
    free_.erase(std::remove_if(free_.begin(), free_.end(), too_large), free_.end());
  }

  // An arena of at least so many bytes that no other call uses; one without data for none.  Throws std::bad_alloc.
  Arena Take(int64_t bytes) {
    if (bytes == 0) return {};
    Arena small;
    if (bytes <= kMostKept) {
      std::lock_guard lock(mutex_);
      for (size_t k = free_.size(); k-- > 0;) {
        if (free_[k].bytes < bytes) continue;
        Arena found = free_[k];
        free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(k));
        return found;
      }
      if (!free_.empty()) {  // the new one takes its place
        small = free_.back();
        free_.pop_back();
      }
    }
    std::free(small.data);
    return Make(bytes);
  }
  // Keeps an arena for the next call, or frees it where none needs it or there is no memory for the list.
  void Give(Arena arena) noexcept {
    if (arena.data == nullptr) return;
    try {
      std::lock_guard lock(mutex_);
      if (!TooLarge(arena)) {
        free_.push_back(arena);
        return;
      }
    } catch (const std::exception&) {
    }
    std::free(arena.data);
  }

  // Memory of arenas that no call uses.
  int64_t FreeBytes() {
    std::lock_guard lock(mutex_);
    int64_t sum = 0;
    for (const Arena& arena : free_) sum += arena.bytes;
    return sum;
  }

 private:
  static constexpr int64_t kHugePage = 2 << 20;
  static constexpr int64_t kMostKept = 1 << 30;  // larger arenas go back to the system after each call

  static int64_t Size(int64_t bytes) {
    int64_t align = Align(bytes);
    return (bytes + align - 1) / align * align;
  }
  static int64_t Align(int64_t bytes) { return bytes >= kHugePage ? kHugePage : kAlign; }
  static Arena Make(int64_t bytes) {
    int64_t size = Size(bytes);
    void* data = std::aligned_alloc(static_cast<size_t>(Align(bytes)), static_cast<size_t>(size));
    if (data == nullptr) throw std::bad_alloc();
#if defined(__linux__)
    if (bytes >= kHugePage) madvise(data, static_cast<size_t>(size), MADV_HUGEPAGE);  // a hint: fewer page faults
#endif
    return {static_cast<char*>(data), size};
  }
  bool TooLarge(const Arena& arena) const {
    auto largest = needed_.upper_bound(kMostKept);  // those beyond are not kept
    return largest == needed_.begin() || arena.bytes > Size(*std::prev(largest));
  }

  std::mutex mutex_;
  std::multiset<int64_t> needed_;
  std::vector<Arena> free_;
};

// Leaked on purpose, like the table.
ArenaPool& GetArenas() {
  static ArenaPool* pool = new ArenaPool;
  return *pool;
}

enum PlaceKind : int64_t { kOperand = 0, kResult = 1, kScratch = 2 };

struct Place {
  int64_t kind, number, offset;
};

struct Step {
  Kernel kernel;
  int64_t tiles, slots, scratch_stride, scratch_offset;
  std::vector<Place> places;

  char* Scratch(char* arena) const { return scratch_stride > 0 ? AlignUp(arena + scratch_offset) : nullptr; }
};

// Writes the pointers of a kernel's buffers. `base_of`: where a place's memory begins.
template <typename BaseOf>
static void Gather(const Step& step, void** out, const BaseOf& base_of) {
  for (const Place& place : step.places) *out++ = base_of(place) + place.offset;
}

// Runs `body` with an arena of so many bytes. `who` is what messages begin with.
template <typename Body>
static ffi::Error WithArena(int64_t bytes, const char* who, const Body& body) {
  ArenaPool::Arena arena;
  try {
    arena = GetArenas().Take(bytes);
    body(arena.data);
    GetArenas().Give(arena);
    return ffi::Error::Success();
  } catch (const std::exception& error) {  // out of memory: nothing may unwind into XLA
    GetArenas().Give(arena);
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(who) + ": " + error.what());
  }
}

}  // namespace jcuts

#include "cpu_team.h"

namespace jcuts {

struct ChainState {
  static ffi::TypeId id;
  explicit ChainState(int64_t bytes) : arena_bytes(bytes) { GetArenas().Add(arena_bytes); }
  ~ChainState() { GetArenas().Remove(arena_bytes); }
  ChainState(const ChainState&) = delete;
  ChainState& operator=(const ChainState&) = delete;
  const int64_t arena_bytes;
  std::vector<Step> steps;
  int64_t operands = 0, results = 0;  // numbers that steps name, plus one
  int64_t shared = 0;                 // kernels with tiles for several threads
};

ffi::TypeId ChainState::id = {};
ffi::TypeInfo chain_state_info = ffi::MakeTypeInfo<ChainState>();

// `wiring`: per kernel its number of buffers, where its scratch memory begins in the arena, and per buffer kind, number
// and offset; `sizes`: per kernel tiles, scratch bytes per slot, slots.
static ffi::ErrorOr<std::unique_ptr<ChainState>> InstantiateChain(std::string_view digests,
                                                                  ffi::Span<const int64_t> wiring,
                                                                  ffi::Span<const int64_t> sizes,
                                                                  int64_t arena_bytes) {
  auto impossible = [](const std::string& what) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("jcuts chain: impossible " + what));
  };
  if (arena_bytes < 0) return impossible("arena of " + std::to_string(arena_bytes) + " bytes");
  auto state = std::make_unique<ChainState>(arena_bytes);
  std::string names(digests);
  size_t at = 0, wire = 0;
  for (size_t begin = 0; begin < names.size();) {
    size_t end = names.find(' ', begin);
    if (end == std::string::npos) end = names.size();
    std::string name = names.substr(begin, end - begin);
    begin = end + 1;
    if (at + 3 > sizes.size() || wire + 2 > wiring.size()) return impossible("attributes of kernel " + name);
    int64_t scratch_bytes = sizes[at + 1];
    Step step{nullptr, sizes[at], sizes[at + 2], RoundUp(scratch_bytes), wiring[wire + 1], {}};
    int64_t count = wiring[wire];
    at += 3;
    wire += 2;
    if (step.tiles < 1 || step.slots < 1 || scratch_bytes < 0 || count < 1 || step.scratch_offset < 0 ||
        step.scratch_offset > arena_bytes || static_cast<size_t>(count) > (wiring.size() - wire) / 3) {
      return impossible("attributes of kernel " + name);
    }
    for (int64_t k = 0; k < count; ++k, wire += 3) {
      Place place{wiring[wire], wiring[wire + 1], wiring[wire + 2]};
      bool known = place.kind == kOperand || place.kind == kResult || place.kind == kScratch;
      if (!known || place.number < 0 || place.offset < 0 || (place.kind == kScratch && place.offset >= arena_bytes)) {
        return impossible("buffer of kernel " + name);
      }
      if (place.kind == kOperand) state->operands = std::max(state->operands, place.number + 1);
      if (place.kind == kResult) state->results = std::max(state->results, place.number + 1);
      step.places.push_back(place);
    }
    step.kernel = Resolve(name);
    if (step.kernel == nullptr) return ffi::Unexpected(Unknown(name));
    if (step.tiles > 1 && step.slots > 1) ++state->shared;
    state->steps.push_back(std::move(step));
  }
  if (state->steps.empty() || at != sizes.size() || wire != wiring.size()) return impossible("number of kernels");
  return ffi::ErrorOr<std::unique_ptr<ChainState>>(std::move(state));
}

static ffi::Error ExecuteChain(ChainState* state, ffi::ThreadPool pool, ffi::RemainingArgs args,
                               ffi::RemainingRets rets) {
  if (static_cast<int64_t>(args.size()) < state->operands || static_cast<int64_t>(rets.size()) < state->results) {
    return ffi::Error::InvalidArgument("jcuts chain: fewer buffers than its kernels name");
  }
  return WithArena(state->arena_bytes, "jcuts chain", [&](char* arena) {
    auto gather = [&](const Step& step, void** out) {
      Gather(step, out, [&](const Place& place) {
        void* base = place.kind == kOperand  ? args.get<ffi::AnyBuffer>(place.number).value().untyped_data()
                     : place.kind == kResult ? rets.get<ffi::AnyBuffer>(place.number).value()->untyped_data()
                                             : arena;
        return static_cast<char*>(base);
      });
    };
    if (state->shared >= 2) {
      auto [team, helpers] = MakeTeam(state->steps, arena, pool);
      TeamScope scope{team};
      Team::Invite(team, helpers, pool);
      for (size_t number = 0; number < state->steps.size(); ++number) {
        gather(state->steps[number], team->launch(number).buffers.data());
        team->Run(number);
      }
    } else {
      for (const Step& step : state->steps) {
        RunTiles(step.kernel, step.tiles, step.slots, step.Scratch(arena), step.scratch_stride, step.places.size(),
                 [&](void** out) { gather(step, out); }, pool);
      }
    }
  });
}

}  // namespace jcuts

XLA_FFI_DEFINE_HANDLER_SYMBOL(jcuts_cpu_launch_instantiate, jcuts::Instantiate,
                              ffi::Ffi::BindInstantiate()
                                  .Attr<std::string_view>("digest")
                                  .Attr<int64_t>("num_outputs")
                                  .Attr<int64_t>("scratch_bytes")
                                  .Attr<int64_t>("slots")
                                  .Attr<int64_t>("tiles"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jcuts_cpu_launch_execute, jcuts::Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<jcuts::LaunchState>>()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jcuts_cpu_chain_instantiate, jcuts::InstantiateChain,
                              ffi::Ffi::BindInstantiate()
                                  .Attr<std::string_view>("digests")
                                  .Attr<ffi::Span<const int64_t>>("wiring")
                                  .Attr<ffi::Span<const int64_t>>("sizes")
                                  .Attr<int64_t>("arena_bytes"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jcuts_cpu_chain_execute, jcuts::ExecuteChain,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<jcuts::ChainState>>()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets());

// ---------------------------------------------------------------------------------------------------------------------
// Loops over chains.

#include "launch_cpu_loop.h"

// ---------------------------------------------------------------------------------------------------------------------
// Plain C, called from Python through ctypes.

extern "C" {

// XLA FFI version that this library was built against: 1000 * major + minor.
int jcuts_ffi_api_version() { return 1000 * XLA_FFI_API_MAJOR + XLA_FFI_API_MINOR; }

void* jcuts_state_type_id() { return &jcuts::LaunchState::id; }
void* jcuts_state_type_info() { return &jcuts::launch_state_info; }
void* jcuts_chain_type_id() { return &jcuts::ChainState::id; }
void* jcuts_chain_type_info() { return &jcuts::chain_state_info; }
void* jcuts_loop_type_id() { return &jcuts::LoopState::id; }
void* jcuts_loop_type_info() { return &jcuts::loop_state_info; }

// The code behind `kernel` must stay mapped for the life of the process: executables keep the pointer.
int jcuts_register(const char* digest, void* kernel) {
  if (digest == nullptr || kernel == nullptr) return 1;
  jcuts::GetTable().Put(digest, reinterpret_cast<jcuts::Kernel>(kernel));
  return 0;
}

// Forgets the name; executables that already hold the kernel keep working.
int jcuts_unregister(const char* digest) { return jcuts::GetTable().Erase(digest) ? 0 : 1; }

int jcuts_is_registered(const char* digest) { return jcuts::GetTable().Find(digest) != nullptr ? 1 : 0; }

// Bytes that chains keep between calls.
int64_t jcuts_arena_bytes() { return jcuts::GetArenas().FreeBytes(); }

void jcuts_set_resolver(jcuts::Resolver resolver) { jcuts::g_resolver.store(resolver, std::memory_order_release); }

// Times `repeats` launches one by one on `threads` threads that live for this call (the measuring process has no JAX
// and hence no pool).  `scratch` holds threads * round_up(scratch_bytes, 64) bytes, 64-byte aligned, or is null.
// Writes one wall time [s] per launch.  Returns 0, or 1 on impossible arguments.
int jcuts_bench(void* kernel, void** buffers, int64_t tiles, void* scratch, int64_t scratch_bytes, int64_t threads,
                int64_t repeats, double* seconds) {
  if (kernel == nullptr || buffers == nullptr || tiles < 1 || threads < 1 || repeats < 0 || scratch_bytes < 0 ||
      (scratch_bytes > 0 && scratch == nullptr)) {
    return 1;
  }
  using Clock = std::chrono::steady_clock;
  auto function = reinterpret_cast<jcuts::Kernel>(kernel);
  threads = std::min(threads, tiles);
  int64_t stride = jcuts::RoundUp(scratch_bytes);
  int64_t chunk = jcuts::Chunk(tiles, threads);
  auto* base = static_cast<char*>(scratch);

  // The threads are this call's own, so all of them are waited for: a helper still leaving launch i must not take tiles
  // of launch i + 1.
  struct Shared {
    alignas(64) std::atomic<int64_t> launch{0};
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int64_t> helpers_done{0};
    std::atomic<bool> stop{false};
  } shared;

  auto work = [&](int64_t slot) {
    for (;;) {
      int64_t begin = shared.next.fetch_add(chunk, std::memory_order_acq_rel);
      if (begin >= tiles) return;
      function(buffers, begin, std::min(begin + chunk, tiles), base == nullptr ? nullptr : base + slot * stride);
    }
  };
  jcuts::FpMode mode = jcuts::GetFpMode();
  std::vector<std::thread> helpers;
  auto finish = [&] {
    shared.stop.store(true, std::memory_order_release);
    for (std::thread& helper : helpers) helper.join();
  };
  try {
    for (int64_t slot = 1; slot < threads; ++slot) {
      helpers.emplace_back([&, slot] {
        jcuts::FpModeScope scope(mode);
        int64_t seen = 0;
        for (;;) {
          jcuts::Backoff backoff;
          while (shared.launch.load(std::memory_order_acquire) == seen) {
            if (shared.stop.load(std::memory_order_acquire)) return;
            backoff.Pause();
          }
          ++seen;
          work(slot);
          shared.helpers_done.fetch_add(1, std::memory_order_release);
        }
      });
    }
  } catch (const std::exception&) {  // the system has no more threads
    finish();
    return 1;
  }
  for (int64_t i = 0; i < repeats; ++i) {
    shared.next.store(0, std::memory_order_relaxed);
    shared.helpers_done.store(0, std::memory_order_relaxed);
    Clock::time_point start = Clock::now();
    shared.launch.fetch_add(1, std::memory_order_release);
    work(0);
    jcuts::Backoff backoff;
    while (shared.helpers_done.load(std::memory_order_acquire) < threads - 1) backoff.Pause();
    seconds[i] = std::chrono::duration<double>(Clock::now() - start).count();
  }
  finish();
  return 0;
}

}  // extern "C"
