// A loop whose body is a chain of CPU kernels, as one call: `lax.scan` without XLA's while loop around it.
//
// The kernels of the chain take their buffers through two tables that change from step to step.  A *feed* is what the
// body reads: an operand that is the same in every step, a carried value, or a step's part of an operand that is
// scanned.  A *drain* is what the body writes: a step's part of a result that stacks them, or one of two buffers of the
// arena in turns, so that a kernel never writes what the step still reads.  Carried values are pointers: to what the
// step before has written.  Values that no kernel makes (the old state as a result) are copied.

#ifndef JCUTS_CUSTOM_CALLS_LAUNCH_CPU_LOOP_H_
#define JCUTS_CUSTOM_CALLS_LAUNCH_CPU_LOOP_H_

#include <cstring>

namespace jcuts {

enum FeedKind : int64_t { kInvariant = 0, kCarried = 1, kScanned = 2 };
enum SourceKind : int64_t { kDrain = 0, kFeed = 1 };

struct Feed {
  int64_t kind, number, stride;  // number of an operand, or of a carried value
};
struct Drain {
  int64_t result, stride, offsets[2];  // result -1: none stacks it, the arena has it
};
struct Carry {
  int64_t operand, result, bytes, source, number;  // its next value is a drain or a feed
};
struct Copy {
  int64_t feed, result, bytes;
};

struct LoopState {
  static ffi::TypeId id;
  std::unique_ptr<ChainState> chain;
  int64_t length = 0;
  bool reverse = false;
  std::vector<Feed> feeds;
  std::vector<Drain> drains;
  std::vector<Carry> carries;
  std::vector<Copy> copies;
  int64_t operands = 0, results = 0;
};

ffi::TypeId LoopState::id = {};
ffi::TypeInfo loop_state_info = ffi::MakeTypeInfo<LoopState>();

// Reads groups of numbers; says whether there were enough.
class LoopPlan {
 public:
  explicit LoopPlan(ffi::Span<const int64_t> numbers) : numbers_(numbers) {}
  bool Take(int64_t* out, size_t count) {
    if (count > numbers_.size() - at_) return false;
    for (size_t k = 0; k < count; ++k) out[k] = numbers_[at_++];
    return true;
  }
  size_t left() const { return numbers_.size() - at_; }

 private:
  ffi::Span<const int64_t> numbers_;
  size_t at_ = 0;
};

// `plan`: numbers of feeds, drains, carried values and copies, and these (their members in order).
static ffi::ErrorOr<std::unique_ptr<LoopState>> InstantiateLoop(std::string_view digests,
                                                                ffi::Span<const int64_t> wiring,
                                                                ffi::Span<const int64_t> sizes, int64_t arena_bytes,
                                                                int64_t length, int64_t reverse,
                                                                ffi::Span<const int64_t> plan) {
  auto impossible = [](const std::string& what) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("jcuts loop: impossible " + what));
  };
  auto chain = InstantiateChain(digests, wiring, sizes, arena_bytes);
  if (chain.has_error()) return ffi::Unexpected(chain.error());
  auto state = std::make_unique<LoopState>();
  state->chain = std::move(chain.value());
  state->length = length;
  state->reverse = reverse != 0;
  LoopPlan reader(plan);
  int64_t counts[4];
  if (length < 0 || !reader.Take(counts, 4)) return impossible("length or plan");
  for (int64_t count : counts) {
    if (count < 0 || static_cast<size_t>(count) > reader.left()) return impossible("plan");
  }
  auto operand = [&](int64_t number) { state->operands = std::max(state->operands, number + 1); };
  auto result = [&](int64_t number) { state->results = std::max(state->results, number + 1); };
  for (int64_t k = 0; k < counts[0]; ++k) {
    Feed feed;
    if (!reader.Take(&feed.kind, 3) || feed.kind < kInvariant || feed.kind > kScanned || feed.number < 0 ||
        feed.stride < 0 || (feed.kind == kCarried && feed.number >= counts[2])) {
      return impossible("operand of its body");
    }
    if (feed.kind != kCarried) operand(feed.number);
    state->feeds.push_back(feed);
  }
  for (int64_t k = 0; k < counts[1]; ++k) {
    Drain drain;
    bool whole = reader.Take(&drain.result, 4) && drain.result >= -1 && drain.stride >= 0;
    bool inside = whole && drain.offsets[0] >= 0 && drain.offsets[0] <= arena_bytes && drain.offsets[1] >= 0 &&
                  drain.offsets[1] <= arena_bytes;
    if (!inside) return impossible("result of its body");
    if (drain.result >= 0) result(drain.result);
    state->drains.push_back(drain);
  }
  for (int64_t k = 0; k < counts[2]; ++k) {
    Carry carry;
    if (!reader.Take(&carry.operand, 5) || carry.operand < 0 || carry.result < 0 || carry.bytes < 0 ||
        carry.source < kDrain || carry.source > kFeed || carry.number < 0 ||
        carry.number >= counts[carry.source == kDrain ? 1 : 0]) {
      return impossible("carried value");
    }
    operand(carry.operand);
    result(carry.result);
    state->carries.push_back(carry);
  }
  for (int64_t k = 0; k < counts[3]; ++k) {
    Copy copy;
    if (!reader.Take(&copy.feed, 3) || copy.feed < 0 || copy.feed >= counts[0] || copy.result < 0 || copy.bytes < 0) {
      return impossible("copy");
    }
    result(copy.result);
    state->copies.push_back(copy);
  }
  if (reader.left() != 0 || state->chain->operands > counts[0] || state->chain->results > counts[1]) {
    return impossible("number of buffers");
  }
  return ffi::ErrorOr<std::unique_ptr<LoopState>>(std::move(state));
}

static void RunLoop(const LoopState& state, char* arena, const std::vector<char*>& operands,
                    const std::vector<char*>& results, ffi::ThreadPool& pool) {
  const std::vector<Step>& chain = state.chain->steps;
  auto [made, helpers] = MakeTeam(chain, arena, pool);
  TeamScope scope{made};
  Team::Invite(made, helpers, pool);
  Team& team = *made;
  std::vector<char*> carried, feeds(state.feeds.size()), drains(state.drains.size());
  for (const Carry& carry : state.carries) carried.push_back(operands[carry.operand]);
  for (int64_t step = 0; step < state.length; ++step) {
    int64_t place = state.reverse ? state.length - 1 - step : step;
    for (size_t k = 0; k < feeds.size(); ++k) {
      const Feed& feed = state.feeds[k];
      feeds[k] = feed.kind == kCarried ? carried[feed.number] : operands[feed.number] + feed.stride * place;
    }
    for (size_t k = 0; k < drains.size(); ++k) {
      const Drain& drain = state.drains[k];
      drains[k] = drain.result < 0 ? arena + drain.offsets[step % 2] : results[drain.result] + drain.stride * place;
    }
    for (const Copy& copy : state.copies) {
      std::memcpy(results[copy.result] + copy.bytes * place, feeds[copy.feed], static_cast<size_t>(copy.bytes));
    }
    for (size_t number = 0; number < chain.size(); ++number) {
      Gather(chain[number], team.launch(number).buffers.data(), [&](const Place& where) {
        return where.kind == kOperand ? feeds[where.number] : where.kind == kResult ? drains[where.number] : arena;
      });
      team.Run(number);
    }
    for (size_t k = 0; k < carried.size(); ++k) {
      const Carry& carry = state.carries[k];
      carried[k] = carry.source == kDrain ? drains[carry.number] : feeds[carry.number];
    }
  }
  for (size_t k = 0; k < carried.size(); ++k) {
    const Carry& carry = state.carries[k];
    std::memmove(results[carry.result], carried[k], static_cast<size_t>(carry.bytes));
  }
}

static ffi::Error ExecuteLoop(LoopState* state, ffi::ThreadPool pool, ffi::RemainingArgs args,
                              ffi::RemainingRets rets) {
  if (static_cast<int64_t>(args.size()) < state->operands || static_cast<int64_t>(rets.size()) < state->results) {
    return ffi::Error::InvalidArgument("jcuts loop: fewer buffers than its plan names");
  }
  return WithArena(state->chain->arena_bytes, "jcuts loop", [&](char* arena) {
    std::vector<char*> operands, results;
    for (size_t k = 0; k < args.size(); ++k) {
      operands.push_back(static_cast<char*>(args.get<ffi::AnyBuffer>(k).value().untyped_data()));
    }
    for (size_t k = 0; k < rets.size(); ++k) {
      results.push_back(static_cast<char*>(rets.get<ffi::AnyBuffer>(k).value()->untyped_data()));
    }
    RunLoop(*state, arena, operands, results, pool);
  });
}

}  // namespace jcuts

XLA_FFI_DEFINE_HANDLER_SYMBOL(jcuts_cpu_loop_instantiate, jcuts::InstantiateLoop,
                              ffi::Ffi::BindInstantiate()
                                  .Attr<std::string_view>("digests")
                                  .Attr<ffi::Span<const int64_t>>("wiring")
                                  .Attr<ffi::Span<const int64_t>>("sizes")
                                  .Attr<int64_t>("arena_bytes")
                                  .Attr<int64_t>("length")
                                  .Attr<int64_t>("reverse")
                                  .Attr<ffi::Span<const int64_t>>("plan"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jcuts_cpu_loop_execute, jcuts::ExecuteLoop,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<jcuts::LoopState>>()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets());

#endif  // JCUTS_CUSTOM_CALLS_LAUNCH_CPU_LOOP_H_
