// Launches jcuts' CUDA kernels from XLA:GPU through the typed FFI.
//
// A kernel image is a cubin and the list of launches that one call makes (a reduction split over the grid makes two).
// HLO names it by content hash.  What each FFI stage does:
//
//   instantiate  once per executable, no device: resolves the hash to the image held in host memory.
//   initialize   before every execution, with the device: loads the image on that device.  The hit path is one atomic
//                load; no lock is taken.
//   execute      may run while a stream is being captured into a CUDA graph: it only launches.
//
// A chain (jcuts_cuda_chain) is one call of several images, one after the other: what one makes for another lies in the
// call's scratch memory.  A kernel that waits for the grid in front of it (`waits`) may be launched before that one has
// ended, which hides most of what a launch takes; inside a CUDA graph the stream's capture makes such an edge of it.
// XLA's own edges, between calls, always wait for the end: hence chains.
//
// The CUDA driver is opened at run time (dlopen), so that this library builds and loads on any Linux machine.  Scratch
// memory is an extra result of the call: memory taken from XLA's scratch allocator is freed when the handler returns,
// and a replayed graph would use it after that.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jcuts {

// ---------------------------------------------------------------------------------------------------------------------
// Images.

struct Argument {
  int64_t buffer;  // operand or result number; -1: scratch
  int64_t offset;  // bytes into the scratch memory
};

struct Launch {
  std::string symbol;
  unsigned grid[3];
  unsigned block[3];
  unsigned cluster[3];
  unsigned shared_bytes;
  bool cooperative;
  bool waits;  // the kernel touches no memory before the grid in front of it is complete: it may be launched early
  std::vector<Argument> arguments;
};

constexpr int kMaxDevices = 64;
constexpr size_t kMaxArguments = 256;

// Nothing but an error text: empty means success.
using Problem = std::string;

class Image {
 public:
  std::string digest;
  std::string region;
  std::string cubin;
  std::vector<Launch> launches;

  Image() = default;
  Image(const Image&) = delete;
  Image& operator=(const Image&) = delete;
  ~Image() {
    for (auto& slot : functions_) delete slot.load(std::memory_order_relaxed);
    if (library_ != nullptr) GetDriver().LibraryUnload(library_);  // fails harmlessly while the process ends
  }

  bool IsLoaded(int device) const {
    return device >= 0 && device < kMaxDevices && functions_[device].load(std::memory_order_acquire) != nullptr;
  }

  // Makes the image ready on a device.
  Problem Load(int device) {
    if (IsLoaded(device)) return {};
    if (device < 0 || device >= kMaxDevices) return What("device " + std::to_string(device) + " is out of range");
    Driver& driver = GetDriver();
    if (!driver.problem.empty()) return What(driver.problem);
    std::lock_guard lock(mutex_);
    if (IsLoaded(device)) return {};
    if (library_ == nullptr) {
      CUresult code = driver.LibraryLoadData(&library_, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
      if (code != 0) {
        library_ = nullptr;
        return What("loading the cubin failed: " + driver.Text(code));
      }
    }
    CUdevice handle = 0;
    CUcontext context = nullptr;
    if (CUresult code = driver.DeviceGet(&handle, device); code != 0) return What(driver.Text(code));
    if (CUresult code = driver.PrimaryRetain(&context, handle); code != 0) return What(driver.Text(code));
    Problem problem;
    if (CUresult code = driver.CtxPush(context); code != 0) {
      problem = What(driver.Text(code));
    } else {
      problem = LoadInContext(driver, handle, device);
      driver.CtxPop(&context);
    }
    driver.PrimaryRelease(handle);  // XLA holds the context as long as the device is in use
    return problem;
  }

  // Args: early: a kernel of this call is in front of this image's first one.
  Problem Run(int device, CUstream stream, void* const* buffers, size_t count, char* scratch, bool early) const {
    auto* functions = device >= 0 && device < kMaxDevices ? functions_[device].load(std::memory_order_acquire) : nullptr;
    if (functions == nullptr) return What("it was not initialised on device " + std::to_string(device));
    Driver& driver = GetDriver();
    for (size_t k = 0; k < launches.size(); ++k) {
      const Launch& launch = launches[k];
      void* values[kMaxArguments];
      void* pointers[kMaxArguments];
      for (size_t i = 0; i < launch.arguments.size(); ++i) {
        const Argument& argument = launch.arguments[i];
        if (argument.buffer >= static_cast<int64_t>(count)) return What("a launch uses a buffer that does not exist");
        values[i] = argument.buffer < 0 ? scratch + argument.offset : buffers[argument.buffer];
        pointers[i] = &values[i];
      }
      LaunchAttribute attributes[3];
      LaunchConfig config;
      std::memcpy(config.grid, launch.grid, sizeof(config.grid));
      std::memcpy(config.block, launch.block, sizeof(config.block));
      config.shared_bytes = launch.shared_bytes;
      config.stream = stream;
      config.attributes = attributes;
      config.num_attributes = 0;
      if (launch.cooperative) {
        LaunchAttribute& attribute = attributes[config.num_attributes++];
        attribute = LaunchAttribute{};
        attribute.id = kLaunchCooperative;
        attribute.value.cooperative = 1;
      }
      if (launch.cluster[0] * launch.cluster[1] * launch.cluster[2] > 1) {
        LaunchAttribute& attribute = attributes[config.num_attributes++];
        attribute = LaunchAttribute{};
        attribute.id = kLaunchClusterDimension;
        std::memcpy(attribute.value.cluster, launch.cluster, sizeof(launch.cluster));
      }
      if (launch.waits && !launch.cooperative && (early || k > 0) && driver.version >= kProgrammaticVersion) {
        LaunchAttribute& attribute = attributes[config.num_attributes++];
        attribute = LaunchAttribute{};
        attribute.id = kLaunchProgrammatic;
        attribute.value.programmatic = 1;
      }
      CUresult code = driver.LaunchKernelEx(&config, (*functions)[k], pointers, nullptr);
      if (code != 0) return What("launching " + launch.symbol + " failed: " + driver.Text(code));
    }
    return {};
  }

  Problem What(const std::string& what) const { return "jcuts kernel " + digest + " (" + region + "): " + what; }

 private:
  Problem LoadInContext(Driver& driver, CUdevice handle, int device) {
    auto functions = std::make_unique<std::vector<CUfunction>>();
    for (const Launch& launch : launches) {
      CUkernel kernel = nullptr;
      CUfunction function = nullptr;
      CUresult code = driver.LibraryGetKernel(&kernel, library_, launch.symbol.c_str());
      // The limit of 48 KiB counts static memory too, whose size is the kernel's own affair.
      if (code == 0 && launch.shared_bytes > 0) {
        code = driver.KernelSetAttribute(kMaxDynamicSharedSize, static_cast<int>(launch.shared_bytes), kernel, handle);
      }
      if (code == 0 && launch.cluster[0] * launch.cluster[1] * launch.cluster[2] > kPortableCluster) {
        code = driver.KernelSetAttribute(kNonPortableClusterAllowed, 1, kernel, handle);
      }
      // Asking for the function loads it now: nothing is left to be loaded while a graph is captured.
      if (code == 0) code = driver.KernelGetFunction(&function, kernel);
      if (code != 0) return What("preparing " + launch.symbol + " failed: " + driver.Text(code));
      functions->push_back(function);
    }
    functions_[device].store(functions.release(), std::memory_order_release);
    return {};
  }

  std::mutex mutex_;
  CUlibrary library_ = nullptr;
  std::atomic<std::vector<CUfunction>*> functions_[kMaxDevices] = {};
};

using ImagePtr = std::shared_ptr<Image>;
// Returns non-zero when it has registered the digest.
using Resolver = int (*)(const char* digest);

class Table {
 public:
  void Put(ImagePtr image) {
    std::lock_guard lock(mutex_);
    images_[image->digest] = std::move(image);
  }
  bool Erase(const std::string& digest) {
    std::lock_guard lock(mutex_);
    return images_.erase(digest) != 0;
  }
  ImagePtr Find(const std::string& digest) {
    std::lock_guard lock(mutex_);
    auto found = images_.find(digest);
    return found == images_.end() ? nullptr : found->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, ImagePtr> images_;
};

// Leaked on purpose: executables may be destroyed after static destructors have run.
Table& GetTable() {
  static Table* table = new Table;
  return *table;
}

std::atomic<Resolver> g_resolver{nullptr};

ImagePtr Resolve(const std::string& digest) {
  if (ImagePtr image = GetTable().Find(digest)) return image;
  // The resolver takes the Python lock: no lock of ours may be held here.
  Resolver resolver = g_resolver.load(std::memory_order_acquire);
  if (resolver == nullptr || resolver(digest.c_str()) == 0) return nullptr;
  return GetTable().Find(digest);
}

// ---------------------------------------------------------------------------------------------------------------------
// FFI stages.

struct CudaLaunchState {
  static ffi::TypeId id;
  ImagePtr image;
  int64_t num_outputs;
  bool has_scratch;
  int64_t start;  // bytes of the first result before what the kernel writes
};

ffi::TypeId CudaLaunchState::id = {};
ffi::TypeInfo cuda_launch_state_info = ffi::MakeTypeInfo<CudaLaunchState>();

static ffi::Error Unknown(const std::string& name) {
  return ffi::Error(ffi::ErrorCode::kNotFound,
                    "jcuts kernel " + name +
                        " is not known to this process and is not in its object cache. The executable was compiled by "
                        "another process, machine or jcuts version: import jcuts with the same JCUTS_CACHE_DIR before "
                        "loading it, or clear JAX's persistent compilation cache and compile again.");
}

static ffi::ErrorOr<std::unique_ptr<CudaLaunchState>> Instantiate(std::string_view digest, int64_t num_outputs,
                                                                  int64_t scratch_bytes, int64_t start) {
  std::string name(digest);
  ImagePtr image = Resolve(name);
  if (image == nullptr) return ffi::Unexpected(Unknown(name));
  auto state = std::make_unique<CudaLaunchState>();
  state->image = std::move(image);
  state->num_outputs = num_outputs;
  state->has_scratch = scratch_bytes > 0;
  state->start = start;
  return ffi::ErrorOr<std::unique_ptr<CudaLaunchState>>(std::move(state));
}

// What `act` says as XLA's error; `who` acts.
template <typename Act>
ffi::Error Told(const char* who, Act&& act) {
  try {
    Problem problem = act();
    return problem.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kInternal, problem);
  } catch (const std::exception& error) {  // out of memory: nothing may unwind into XLA
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(who) + ": " + error.what());
  }
}

static ffi::Error Initialize(CudaLaunchState* state, int32_t device) {
  if (state->image->IsLoaded(device)) return ffi::Error::Success();
  return Told("jcuts launch", [&] { return state->image->Load(device); });
}

// How often XLA called the handler: a call inside a CUDA graph is recorded once and then replayed without it.
std::atomic<int64_t> g_executions{0};

static ffi::Error Execute(CudaLaunchState* state, CUstream stream, int32_t device, ffi::RemainingArgs args,
                          ffi::RemainingRets rets) {
  g_executions.fetch_add(1, std::memory_order_relaxed);
  size_t results = static_cast<size_t>(state->num_outputs);
  size_t expected = results + (state->has_scratch ? 1 : 0);
  size_t count = args.size() + results;
  if (rets.size() != expected || count > kMaxArguments) {
    return ffi::Error::InvalidArgument("jcuts launch: expected " + std::to_string(expected) + " result buffers, got " +
                                       std::to_string(rets.size()) + ", with " + std::to_string(args.size()) +
                                       " operands (at most " + std::to_string(kMaxArguments) + " buffers)");
  }
  void* buffers[kMaxArguments];
  size_t n = 0;
  for (size_t i = 0; i < args.size(); ++i) buffers[n++] = args.get<ffi::AnyBuffer>(i).value().untyped_data();
  for (size_t i = 0; i < results; ++i) buffers[n++] = rets.get<ffi::AnyBuffer>(i).value()->untyped_data();
  if (results > 0) buffers[args.size()] = static_cast<char*>(buffers[args.size()]) + state->start;
  char* scratch = nullptr;
  if (state->has_scratch) scratch = static_cast<char*>(rets.get<ffi::AnyBuffer>(results).value()->untyped_data());
  return Told("jcuts launch", [&] { return state->image->Run(device, stream, buffers, count, scratch, false); });
}

// ---------------------------------------------------------------------------------------------------------------------
// Chains.

// Where a buffer of a kernel lies: bytes into an operand, a result or the scratch memory of the chain.
struct Place {
  int64_t kind;  // 0: operand, 1: result, 2: scratch
  int64_t number;
  int64_t offset;
};

struct Link {
  ImagePtr image;
  std::vector<Place> buffers;  // operands, results
  int64_t scratch;             // bytes into the chain's scratch memory of its own
};

struct CudaChainState {
  static ffi::TypeId id;
  std::vector<Link> links;
  bool has_scratch;
  int64_t operands, results;  // numbers that places name
};

ffi::TypeId CudaChainState::id = {};
ffi::TypeInfo cuda_chain_state_info = ffi::MakeTypeInfo<CudaChainState>();

static ffi::Error BadWiring() { return ffi::Error::InvalidArgument("jcuts chain: its wiring is damaged"); }

// Args: digests: of every kernel, each followed by a space; wiring: per kernel its number of buffers, its scratch
// memory's place, and three numbers for the place of each buffer.
static ffi::ErrorOr<std::unique_ptr<CudaChainState>> InstantiateChain(std::string_view digests,
                                                                      ffi::Span<const int64_t> wiring,
                                                                      int64_t scratch_bytes) {
  auto state = std::make_unique<CudaChainState>();
  state->has_scratch = scratch_bytes > 0;
  state->operands = state->results = 0;
  size_t at = 0;
  for (size_t from = 0; from < digests.size();) {
    size_t end = digests.find(' ', from);
    if (end == std::string_view::npos || wiring.size() - at < 2) return ffi::Unexpected(BadWiring());
    std::string name(digests.substr(from, end - from));
    from = end + 1;
    Link link;
    link.image = Resolve(name);
    if (link.image == nullptr) return ffi::Unexpected(Unknown(name));
    int64_t count = wiring[at];
    link.scratch = wiring[at + 1];
    at += 2;
    if (count < 1 || count > static_cast<int64_t>(kMaxArguments) || link.scratch < 0 || link.scratch > scratch_bytes ||
        static_cast<int64_t>(wiring.size() - at) < 3 * count) {
      return ffi::Unexpected(BadWiring());
    }
    for (int64_t k = 0; k < count; ++k, at += 3) {
      Place place{wiring[at], wiring[at + 1], wiring[at + 2]};
      if (place.kind < 0 || place.kind > 2 || place.number < 0 || place.offset < 0 ||
          (place.kind == 2 && place.offset > scratch_bytes)) {
        return ffi::Unexpected(BadWiring());
      }
      if (place.kind == 0) state->operands = std::max(state->operands, place.number + 1);
      if (place.kind == 1) state->results = std::max(state->results, place.number + 1);
      link.buffers.push_back(place);
    }
    state->links.push_back(std::move(link));
  }
  if (state->links.empty() || at != wiring.size()) return ffi::Unexpected(BadWiring());
  return ffi::ErrorOr<std::unique_ptr<CudaChainState>>(std::move(state));
}

static ffi::Error InitializeChain(CudaChainState* state, int32_t device) {
  return Told("jcuts chain", [&] {
    Problem problem;
    for (const Link& link : state->links) {
      if (problem = link.image->Load(device); !problem.empty()) break;
    }
    return problem;
  });
}

static ffi::Error ExecuteChain(CudaChainState* state, CUstream stream, int32_t device, ffi::RemainingArgs args,
                               ffi::RemainingRets rets) {
  g_executions.fetch_add(1, std::memory_order_relaxed);
  size_t results = rets.size() - (state->has_scratch && rets.size() > 0 ? 1 : 0);
  if (static_cast<int64_t>(args.size()) < state->operands || static_cast<int64_t>(results) < state->results ||
      (state->has_scratch && rets.size() == 0)) {
    return ffi::Error::InvalidArgument("jcuts chain: it has fewer operands or results than its wiring names");
  }
  return Told("jcuts chain", [&] {
    std::vector<char*> bases[3];
    for (size_t i = 0; i < args.size(); ++i) {
      bases[0].push_back(static_cast<char*>(args.get<ffi::AnyBuffer>(i).value().untyped_data()));
    }
    for (size_t i = 0; i < rets.size(); ++i) {
      bases[i < results ? 1 : 2].push_back(static_cast<char*>(rets.get<ffi::AnyBuffer>(i).value()->untyped_data()));
    }
    if (!state->has_scratch) bases[2].push_back(nullptr);
    void* buffers[kMaxArguments];
    Problem problem;
    bool early = false;
    for (const Link& link : state->links) {
      for (size_t k = 0; k < link.buffers.size(); ++k) {
        const Place& place = link.buffers[k];
        buffers[k] = bases[place.kind][place.kind == 2 ? 0 : place.number] + place.offset;
      }
      char* scratch = bases[2][0] == nullptr ? nullptr : bases[2][0] + link.scratch;
      problem = link.image->Run(device, stream, buffers, link.buffers.size(), scratch, early);
      if (!problem.empty()) break;
      early = true;
    }
    return problem;
  });
}

// Copies a text into a caller's buffer; returns whether there was a problem.
int Report(const Problem& problem, char* text, int64_t size) {
  if (text != nullptr && size > 0) {
    std::strncpy(text, problem.c_str(), static_cast<size_t>(size) - 1);
    text[size - 1] = '\0';
  }
  return problem.empty() ? 0 : 1;
}

// Does nothing with results that must be computed all the same.
ffi::Error Keep(ffi::RemainingArgs, ffi::RemainingRets) { return ffi::Error::Success(); }

// Told of every mark in a program as it is executed, with the mark's number and XLA's stream.
using Hook = void (*)(int64_t, CUstream);
std::atomic<Hook> g_hook{nullptr};

// Likewise; also tells the hook.  Never part of a CUDA graph: the host comes by at every execution.
static ffi::Error Mark(CUstream stream, int64_t number, ffi::RemainingArgs, ffi::RemainingRets) {
  if (Hook hook = g_hook.load(std::memory_order_acquire); hook != nullptr) hook(number, stream);
  return ffi::Error::Success();
}

}  // namespace jcuts

XLA_FFI_DEFINE_HANDLER_SYMBOL(jcuts_keep, jcuts::Keep, ffi::Ffi::Bind().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jcuts_mark, jcuts::Mark,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<jcuts::CUstream>>()
                                  .Attr<int64_t>("number")
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jcuts_cuda_launch_instantiate, jcuts::Instantiate,
                              ffi::Ffi::BindInstantiate()
                                  .Attr<std::string_view>("digest")
                                  .Attr<int64_t>("num_outputs")
                                  .Attr<int64_t>("scratch_bytes")
                                  .Attr<int64_t>("start"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jcuts_cuda_launch_initialize, jcuts::Initialize,
    ffi::Ffi::BindInitialize().Ctx<ffi::State<jcuts::CudaLaunchState>>().Ctx<ffi::DeviceOrdinal>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jcuts_cuda_launch_execute, jcuts::Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<jcuts::CudaLaunchState>>()
                                  .Ctx<ffi::PlatformStream<jcuts::CUstream>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jcuts_cuda_chain_instantiate, jcuts::InstantiateChain,
                              ffi::Ffi::BindInstantiate()
                                  .Attr<std::string_view>("digests")
                                  .Attr<ffi::Span<const int64_t>>("wiring")
                                  .Attr<int64_t>("scratch_bytes"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jcuts_cuda_chain_initialize, jcuts::InitializeChain,
    ffi::Ffi::BindInitialize().Ctx<ffi::State<jcuts::CudaChainState>>().Ctx<ffi::DeviceOrdinal>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jcuts_cuda_chain_execute, jcuts::ExecuteChain,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<jcuts::CudaChainState>>()
                                  .Ctx<ffi::PlatformStream<jcuts::CUstream>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});

// ---------------------------------------------------------------------------------------------------------------------
// Plain C, called from Python through ctypes.

extern "C" {

// XLA FFI version that this library was built against: 1000 * major + minor.
int jcuts_cuda_ffi_api_version() { return 1000 * XLA_FFI_API_MAJOR + XLA_FFI_API_MINOR; }

void* jcuts_cuda_state_type_id() { return &jcuts::CudaLaunchState::id; }
void* jcuts_cuda_state_type_info() { return &jcuts::cuda_launch_state_info; }
void* jcuts_cuda_chain_type_id() { return &jcuts::CudaChainState::id; }
void* jcuts_cuda_chain_type_info() { return &jcuts::cuda_chain_state_info; }

// Which driver library is opened; only before its first use.  Returns 0, or 1 if it is open already.
int jcuts_cuda_set_driver(const char* path) {
  std::lock_guard lock(jcuts::g_driver_mutex);
  if (path == nullptr || jcuts::g_driver.load() != nullptr) return 1;
  *jcuts::g_driver_path = path;
  return 0;
}

// 0 if the driver can be used; else 1, and why in `text`.
int jcuts_cuda_driver(char* text, int64_t size) { return jcuts::Report(jcuts::GetDriver().problem, text, size); }

int64_t jcuts_cuda_executions() { return jcuts::g_executions.load(std::memory_order_relaxed); }

// Registers an image.  Per launch `numbers` holds 13 values: grid x y z, block x y z, cluster x y z, shared bytes,
// cooperative, number of arguments, waits; `arguments` holds (buffer, offset) pairs of all launches, one after the other.
// Returns 0, or 1 on impossible arguments.
int jcuts_cuda_register(const char* digest, const char* region, const void* cubin, int64_t size, int64_t launches,
                        const char* const* symbols, const int64_t* numbers, const int64_t* arguments) {
  if (digest == nullptr || region == nullptr || cubin == nullptr || size < 1 || launches < 1 || symbols == nullptr ||
      numbers == nullptr || arguments == nullptr) {
    return 1;
  }
  auto image = std::make_shared<jcuts::Image>();
  image->digest = digest;
  image->region = region;
  image->cubin.assign(static_cast<const char*>(cubin), static_cast<size_t>(size));
  for (int64_t k = 0; k < launches; ++k, numbers += 13) {
    jcuts::Launch launch;
    launch.symbol = symbols[k];
    for (int i = 0; i < 3; ++i) {
      launch.grid[i] = static_cast<unsigned>(numbers[i]);
      launch.block[i] = static_cast<unsigned>(numbers[3 + i]);
      launch.cluster[i] = static_cast<unsigned>(numbers[6 + i]);
      if (numbers[i] < 1 || numbers[3 + i] < 1 || numbers[6 + i] < 1) return 1;
    }
    if (numbers[9] < 0 || numbers[11] < 0 || numbers[11] > static_cast<int64_t>(jcuts::kMaxArguments)) return 1;
    launch.shared_bytes = static_cast<unsigned>(numbers[9]);
    launch.cooperative = numbers[10] != 0;
    launch.waits = numbers[12] != 0;
    for (int64_t i = 0; i < numbers[11]; ++i, arguments += 2) launch.arguments.push_back({arguments[0], arguments[1]});
    image->launches.push_back(std::move(launch));
  }
  jcuts::GetTable().Put(std::move(image));
  return 0;
}

// Forgets the name; executables that already hold the image keep working, and it is unloaded with the last of them.
int jcuts_cuda_unregister(const char* digest) { return jcuts::GetTable().Erase(digest) ? 0 : 1; }

int jcuts_cuda_is_registered(const char* digest) { return jcuts::GetTable().Find(digest) != nullptr ? 1 : 0; }

void jcuts_cuda_set_resolver(jcuts::Resolver resolver) { jcuts::g_resolver.store(resolver, std::memory_order_release); }

void jcuts_cuda_set_hook(jcuts::Hook hook) { jcuts::g_hook.store(hook, std::memory_order_release); }

// Loads a registered image on a device (needed once) and launches it on a stream, as XLA would: for measuring and
// tests.  `buffers` are device addresses of operands and results.  Returns 0, or 1 and the reason in `text`.
int jcuts_cuda_launch(const char* digest, int device, void* stream, void* const* buffers, int64_t count, void* scratch,
                      char* text, int64_t size) {
  jcuts::ImagePtr image = jcuts::GetTable().Find(digest);
  if (image == nullptr) return jcuts::Report(std::string("no kernel ") + digest + " is registered", text, size);
  jcuts::Problem problem = image->Load(device);
  if (problem.empty()) {
    problem = image->Run(device, stream, buffers, static_cast<size_t>(count), static_cast<char*>(scratch), false);
  }
  return jcuts::Report(problem, text, size);
}

}  // extern "C"
