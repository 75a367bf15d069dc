// Convolutions by cuDNN from XLA through the typed FFI, with algorithm, math type, workspace and division of the batch
// chosen by jcuts (docs/microbatch.md).
//
// One call runs all micro-batches of a convolution, one after the other on XLA's stream, each at its own offset into the
// same operands and results: nothing is sliced, concatenated or copied.  What each FFI stage does:
//
//   instantiate  once per executable, no device: reads the description.
//   initialize   before every execution, with the device: opens cuDNN, makes the device's handle and the descriptors,
//                and checks that the workspace is large enough.  The hit path is one atomic load.
//   execute      sets the stream and launches.  A handle belongs to one thread at a time: concurrent executions on one
//                device take turns for as long as launching takes.
//
// The workspace is the last result of the call, so XLA plans its memory with everything else.  There are two targets
// with the same meaning: `..._graph` may be captured into a CUDA graph, the other is never.

#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <string_view>

#include "cudnn_plan.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jcuts {

struct ConvState {
  static ffi::TypeId id;
  Plan plan;
};
struct HostConvState : ConvState {
  static ffi::TypeId id;
};

ffi::TypeId ConvState::id = {};
ffi::TypeId HostConvState::id = {};
ffi::TypeInfo conv_state_info = ffi::MakeTypeInfo<ConvState>();
ffi::TypeInfo host_conv_state_info = ffi::MakeTypeInfo<HostConvState>();

using Numbers = ffi::Span<const int64_t>;

template <typename State>
static ffi::ErrorOr<std::unique_ptr<State>> Instantiate(std::string_view layer, Numbers shape, Numbers parts,
                                                        int64_t workspace) {
  auto state = std::make_unique<State>();
  Plan& plan = state->plan;
  plan.layer = std::string(layer);
  plan.workspace = workspace;
  Problem problem = workspace < 0 ? plan.What("the workspace is negative")
                                  : plan.FromNumbers(shape.begin(), shape.size(), parts.begin(), parts.size());
  if (!problem.empty()) return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kInvalidArgument, problem));
  return ffi::ErrorOr<std::unique_ptr<State>>(std::move(state));
}

// Nothing may unwind into XLA.
template <typename Work>
static ffi::Error Guarded(const Work& work) {
  try {
    Problem problem = work();
    return problem.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kInternal, problem);
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string("jcuts convolution: ") + error.what());
  }
}

static ffi::Error Initialize(ConvState* state, int32_t device) {
  if (state->plan.IsReady(device)) return ffi::Error::Success();
  return Guarded([&] { return state->plan.Prepare(device); });
}

// Operands: the kernel's two, and with accumulation what is added to, in the result's memory.  Results: the kernel's
// one, and the workspace where there is one.
static Problem RunCall(const Plan& plan, int device, void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  size_t operands = plan.shape.accumulate ? 3 : 2;
  size_t results = plan.workspace > 0 ? 2 : 1;
  if (args.size() != operands || rets.size() != results) {
    return plan.What("expected " + std::to_string(operands) + " operands and " + std::to_string(results) +
                     " results, got " + std::to_string(args.size()) + " and " + std::to_string(rets.size()));
  }
  auto sizes = plan.shape.BufferBytes();
  ffi::AnyBuffer a = args.get<ffi::AnyBuffer>(0).value(), b = args.get<ffi::AnyBuffer>(1).value();
  ffi::Result<ffi::AnyBuffer> out = rets.get<ffi::AnyBuffer>(0).value();
  const size_t found[] = {a.size_bytes(), b.size_bytes(), out->size_bytes()};
  for (int i = 0; i < 3; ++i) {
    if (static_cast<int64_t>(found[i]) != sizes[i]) {
      return plan.What("buffer " + std::to_string(i) + " has " + std::to_string(found[i]) + " bytes, not " +
                       std::to_string(sizes[i]));
    }
  }
  if (plan.shape.accumulate && args.get<ffi::AnyBuffer>(2).value().untyped_data() != out->untyped_data()) {
    return plan.What("the operand to add to is not in the result's memory");
  }
  void* space = nullptr;
  if (plan.workspace > 0) {
    ffi::Result<ffi::AnyBuffer> buffer = rets.get<ffi::AnyBuffer>(1).value();
    if (static_cast<int64_t>(buffer->size_bytes()) < plan.workspace) {
      return plan.What("the workspace has " + std::to_string(buffer->size_bytes()) + " bytes, not " +
                       std::to_string(plan.workspace));
    }
    space = buffer->untyped_data();
  }
  return plan.Run(device, stream, a.untyped_data(), b.untyped_data(), out->untyped_data(), space);
}

static ffi::Error Execute(ConvState* state, CUstream stream, int32_t device, ffi::RemainingArgs args,
                          ffi::RemainingRets rets) {
  return Guarded([&] { return RunCall(state->plan, device, stream, args, rets); });
}

// XLA's CPU platform, for tests with a library that computes in host memory.
static ffi::Error ExecuteOnHost(HostConvState* state, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Guarded([&] {
    Problem problem = state->plan.Prepare(kHost);
    return problem.empty() ? RunCall(state->plan, kHost, nullptr, args, rets) : problem;
  });
}

// Copies a text into a caller's buffer; returns whether there was a problem.
static int Report(const Problem& problem, char* text, int64_t size) {
  if (text != nullptr && size > 0) {
    std::strncpy(text, problem.c_str(), static_cast<size_t>(size) - 1);
    text[size - 1] = '\0';
  }
  return problem.empty() ? 0 : 1;
}

}  // namespace jcuts

#define JCUTS_CONV_ATTRIBUTES \
  .Attr<std::string_view>("layer").Attr<jcuts::Numbers>("shape").Attr<jcuts::Numbers>("parts").Attr<int64_t>("workspace")

XLA_FFI_DEFINE_HANDLER_SYMBOL(jcuts_cudnn_conv_instantiate, jcuts::Instantiate<jcuts::ConvState>,
                              ffi::Ffi::BindInstantiate() JCUTS_CONV_ATTRIBUTES);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jcuts_cudnn_host_instantiate, jcuts::Instantiate<jcuts::HostConvState>,
                              ffi::Ffi::BindInstantiate() JCUTS_CONV_ATTRIBUTES);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jcuts_cudnn_conv_initialize, jcuts::Initialize,
                              ffi::Ffi::BindInitialize().Ctx<ffi::State<jcuts::ConvState>>().Ctx<ffi::DeviceOrdinal>());

#define JCUTS_CONV_EXECUTION               \
  ffi::Ffi::Bind()                         \
      .Ctx<ffi::State<jcuts::ConvState>>() \
      .Ctx<ffi::PlatformStream<jcuts::CUstream>>() \
      .Ctx<ffi::DeviceOrdinal>()           \
      .RemainingArgs()                     \
      .RemainingRets()

XLA_FFI_DEFINE_HANDLER_SYMBOL(jcuts_cudnn_conv_execute, jcuts::Execute, JCUTS_CONV_EXECUTION);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jcuts_cudnn_conv_execute_graph, jcuts::Execute, JCUTS_CONV_EXECUTION,
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jcuts_cudnn_host_execute, jcuts::ExecuteOnHost,
    ffi::Ffi::Bind().Ctx<ffi::State<jcuts::HostConvState>>().RemainingArgs().RemainingRets());

// ---------------------------------------------------------------------------------------------------------------------
// Plain C, called from Python through ctypes.

extern "C" {

// XLA FFI version that this library was built against: 1000 * major + minor.
int jcuts_cudnn_ffi_api_version() { return 1000 * XLA_FFI_API_MAJOR + XLA_FFI_API_MINOR; }

void* jcuts_cudnn_state_type_id() { return &jcuts::ConvState::id; }
void* jcuts_cudnn_state_type_info() { return &jcuts::conv_state_info; }
void* jcuts_cudnn_host_type_id() { return &jcuts::HostConvState::id; }
void* jcuts_cudnn_host_type_info() { return &jcuts::host_conv_state_info; }

// Which cuDNN is opened; only before its first use.  `path` is opened whatever there is ('' for none); `fallback` where
// the process has none open.  Returns 0, or 1 if one is open already.
int jcuts_cudnn_set_library(const char* path, const char* fallback) {
  std::lock_guard lock(jcuts::g_cudnn_mutex);
  if (path == nullptr || fallback == nullptr || jcuts::g_cudnn.load() != nullptr) return 1;
  *jcuts::g_cudnn_path = path;
  *jcuts::g_cudnn_fallback = fallback;
  return 0;
}

// Which driver library is opened, for tests; only before its first use.  Returns 0, or 1 if it is open already.
int jcuts_cudnn_set_driver(const char* path) {
  std::lock_guard lock(jcuts::g_driver_mutex);
  if (path == nullptr || jcuts::g_driver.load() != nullptr) return 1;
  *jcuts::g_driver_path = path;
  return 0;
}

// Version of cuDNN as it says it itself (9.19.0 is 91900); 0, and why in `text`, if it cannot be used.
int64_t jcuts_cudnn_version(char* text, int64_t size) {
  jcuts::Cudnn& cudnn = jcuts::GetCudnn();
  return jcuts::Report(cudnn.problem, text, size) != 0 ? 0 : static_cast<int64_t>(cudnn.GetVersion());
}

// A plan outside XLA, for measuring: made ready on a device (-1: the host), with the workspace that it needs in `needed`
// [bytes].  Returns null, and the reason in `text`.
void* jcuts_cudnn_plan(const char* layer, const int64_t* shape, int64_t shape_size, const int64_t* parts,
                       int64_t parts_size, int device, int64_t* needed, char* text, int64_t size) {
  auto plan = std::make_unique<jcuts::Plan>();
  plan->layer = layer;
  plan->workspace = -1;
  jcuts::Problem problem =
      plan->FromNumbers(shape, static_cast<size_t>(shape_size), parts, static_cast<size_t>(parts_size));
  if (problem.empty()) problem = plan->Prepare(device);
  if (jcuts::Report(problem, text, size) != 0) return nullptr;
  *needed = plan->needed();
  return plan.release();
}

// Launches a plan on a stream; `space` holds the bytes that it needs.  Returns 0, or 1 and the reason in `text`.
int jcuts_cudnn_run(void* plan, int device, void* stream, const void* a, const void* b, void* out, void* space,
                    char* text, int64_t size) {
  return jcuts::Report(static_cast<jcuts::Plan*>(plan)->Run(device, stream, a, b, out, space), text, size);
}

void jcuts_cudnn_plan_free(void* plan) { delete static_cast<jcuts::Plan*>(plan); }

}  // extern "C"
