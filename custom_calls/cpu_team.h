// Threads that run one kernel after the other, for chains and loops of CPU kernels.

#ifndef JCUTS_CUSTOM_CALLS_CPU_TEAM_H_
#define JCUTS_CUSTOM_CALLS_CPU_TEAM_H_

#include <utility>

namespace jcuts {

// The threads of a chain or a loop.  Waking the pool's threads takes tens of microseconds, so that they are asked once
// and spin between launches.  As for single launches the caller waits for tiles that have been taken only, never for a
// thread that may not have started.
//
// `claim_` is the number of the launch and the next tile.  A thread takes tiles by compare-and-swap on both, so that it
// cannot take one of another launch than it has read; between two launches there is none to take (`kClosed`), which is
// when the caller writes what the next one needs.  Late threads find the team stopped; it is theirs, too.

class Team {
 public:
  struct Launch {
    Kernel kernel;
    int64_t tiles, chunk, slots;
    char* scratch;
    int64_t scratch_stride;
    std::vector<void*> buffers;
  };

  explicit Team(std::vector<Launch> launches) : launches_(std::move(launches)), mode_(GetFpMode()) {}

  // Asks the pool for so many threads beside the caller's.
  static void Invite(const std::shared_ptr<Team>& team, int64_t helpers, ffi::ThreadPool& pool) {
    for (int64_t k = 1; k <= helpers; ++k) {
      pool.Schedule([team, k] {
        FpModeScope scope(team->mode_);
        team->Help(k);
      });
    }
  }

  Launch& launch(size_t number) { return launches_[number]; }

  // Runs a launch, whose buffers have been written, and waits for its last tile.
  void Run(size_t number) {
    Launch& launch = launches_[number];
    if (launch.slots == 1 || launch.tiles == 1) {
      launch.kernel(launch.buffers.data(), 0, launch.tiles, launch.scratch);
      return;
    }
    done_.store(0, std::memory_order_relaxed);
    current_.store(number, std::memory_order_relaxed);
    uint64_t epoch = (claim_.load(std::memory_order_relaxed) >> kBits) + 1;
    claim_.store(epoch << kBits, std::memory_order_release);
    while (Take(0)) {
    }
    Backoff backoff;
    while (done_.load(std::memory_order_acquire) < launch.tiles) backoff.Pause();
    claim_.store(epoch << kBits | kClosed, std::memory_order_release);
  }

  void Stop() { stop_.store(true, std::memory_order_release); }

  static constexpr int64_t kMostTiles = (int64_t{1} << 31) - 1;

 private:
  static constexpr int kBits = 32;
  static constexpr uint64_t kClosed = (uint64_t{1} << kBits) - 1;

  void Help(int64_t slot) {
    Backoff backoff;
    while (!stop_.load(std::memory_order_acquire)) {
      if (Take(slot)) {
        backoff = Backoff();
      } else {
        backoff.Pause();
      }
    }
  }

  // Takes and runs some tiles of the current launch; false where there are none for this thread.
  bool Take(int64_t slot) {
    uint64_t seen = claim_.load(std::memory_order_acquire);
    if ((seen & kClosed) == kClosed) return false;
    Launch& launch = launches_[current_.load(std::memory_order_relaxed)];
    int64_t begin = static_cast<int64_t>(seen & kClosed);
    if (begin >= launch.tiles || slot >= launch.slots) return false;
    int64_t end = std::min(begin + launch.chunk, launch.tiles);
    uint64_t next = (seen & ~kClosed) | static_cast<uint64_t>(end);
    if (!claim_.compare_exchange_strong(seen, next, std::memory_order_acq_rel)) return true;  // another one was faster
    char* scratch = launch.scratch == nullptr ? nullptr : launch.scratch + slot * launch.scratch_stride;
    launch.kernel(launch.buffers.data(), begin, end, scratch);
    done_.fetch_add(end - begin, std::memory_order_release);
    return true;
  }

  std::vector<Launch> launches_;
  FpMode mode_;
  alignas(kAlign) std::atomic<uint64_t> claim_{kClosed};
  std::atomic<size_t> current_{0};
  alignas(kAlign) std::atomic<int64_t> done_{0};
  std::atomic<bool> stop_{false};
};

// Stops a team, however the loop ends.
struct TeamScope {
  std::shared_ptr<Team> team;
  ~TeamScope() { team->Stop(); }
};

// The team of a chain's kernels, and the threads beside the caller's that they have tiles for.
static std::pair<std::shared_ptr<Team>, int64_t> MakeTeam(const std::vector<Step>& chain, char* arena,
                                                          ffi::ThreadPool& pool) {
  std::vector<Team::Launch> launches;
  int64_t most = 1;
  for (const Step& kernel : chain) {
    int64_t threads = kernel.tiles > Team::kMostTiles ? 1 : Threads(kernel.tiles, kernel.slots, pool);
    most = std::max(most, threads);
    launches.push_back({kernel.kernel, kernel.tiles, Chunk(kernel.tiles, threads), threads, kernel.Scratch(arena),
                        kernel.scratch_stride, std::vector<void*>(kernel.places.size())});
  }
  return {std::make_shared<Team>(std::move(launches)), most - 1};
}

}  // namespace jcuts

#endif  // JCUTS_CUSTOM_CALLS_CPU_TEAM_H_
