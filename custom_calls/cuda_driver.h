// The part of the CUDA driver's interface that is used here, opened at run time (cuda.h is not needed to build).
//
// Every library that includes this has a driver object of its own: what one of them is told to open does not change the
// others.

#ifndef JCUTS_CUDA_DRIVER_H_
#define JCUTS_CUDA_DRIVER_H_

#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>

namespace jcuts {

using CUresult = int;
using CUdevice = int;
using CUcontext = void*;
using CUstream = void*;
using CUlibrary = void*;
using CUkernel = void*;
using CUfunction = void*;

constexpr int kMaxDynamicSharedSize = 8;       // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kNonPortableClusterAllowed = 14;  // CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
constexpr int kLaunchCooperative = 2;           // CU_LAUNCH_ATTRIBUTE_COOPERATIVE
constexpr int kLaunchClusterDimension = 4;      // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
constexpr int kLaunchProgrammatic = 6;          // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
constexpr int kProgrammaticVersion = 12030;     // CUDA version from which on graphs know such launches
constexpr unsigned kPortableCluster = 8;

struct LaunchAttribute {
  int id;
  int pad;
  union {
    char bytes[64];
    int cooperative;
    int programmatic;
    unsigned cluster[3];
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72, "must have the layout of CUlaunchAttribute");

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  CUstream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

// Rows of `width` bytes, a pitch apart on either side; both in the device's memory.
struct RowsCopy {
  size_t source_x, source_y;
  int source_type;  // 2: CU_MEMORYTYPE_DEVICE
  const void *source_host, *source;
  void* source_array;
  size_t source_pitch, target_x, target_y;
  int target_type;
  void *target_host, *target, *target_array;
  size_t target_pitch, width, height;
};
static_assert(sizeof(RowsCopy) == 128, "must have the layout of CUDA_MEMCPY2D");

struct Driver {
  std::string problem;  // why it cannot be used; empty if it can
  int version = 0;      // of CUDA: 1000 * major + 10 * minor

  CUresult (*Init)(unsigned) = nullptr;
  CUresult (*GetVersion)(int*) = nullptr;
  CUresult (*GetErrorName)(CUresult, const char**) = nullptr;
  CUresult (*GetErrorString)(CUresult, const char**) = nullptr;
  CUresult (*DeviceGet)(CUdevice*, int) = nullptr;
  CUresult (*PrimaryRetain)(CUcontext*, CUdevice) = nullptr;
  CUresult (*PrimaryRelease)(CUdevice) = nullptr;
  CUresult (*CtxPush)(CUcontext) = nullptr;
  CUresult (*CtxPop)(CUcontext*) = nullptr;
  CUresult (*LibraryLoadData)(CUlibrary*, const void*, void*, void*, unsigned, void*, void*, unsigned) = nullptr;
  CUresult (*LibraryUnload)(CUlibrary) = nullptr;
  CUresult (*LibraryGetKernel)(CUkernel*, CUlibrary, const char*) = nullptr;
  CUresult (*KernelGetFunction)(CUfunction*, CUkernel) = nullptr;
  CUresult (*KernelSetAttribute)(int, int, CUkernel, CUdevice) = nullptr;
  CUresult (*LaunchKernelEx)(const LaunchConfig*, CUfunction, void**, void**) = nullptr;
  CUresult (*Memcpy2DAsync)(const RowsCopy*, CUstream) = nullptr;

  explicit Driver(const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* why = dlerror();
      problem = std::string("the CUDA driver cannot be opened: ") + (why != nullptr ? why : path);
      return;
    }
    bool complete = Find(library, "cuInit", Init) && Find(library, "cuDriverGetVersion", GetVersion) &&
                    Find(library, "cuGetErrorName", GetErrorName) &&
                    Find(library, "cuGetErrorString", GetErrorString) && Find(library, "cuDeviceGet", DeviceGet) &&
                    Find(library, "cuDevicePrimaryCtxRetain", PrimaryRetain) &&
                    Find(library, "cuDevicePrimaryCtxRelease_v2", PrimaryRelease) &&
                    Find(library, "cuCtxPushCurrent_v2", CtxPush) && Find(library, "cuCtxPopCurrent_v2", CtxPop) &&
                    Find(library, "cuLibraryLoadData", LibraryLoadData) &&
                    Find(library, "cuLibraryUnload", LibraryUnload) &&
                    Find(library, "cuLibraryGetKernel", LibraryGetKernel) &&
                    Find(library, "cuKernelGetFunction", KernelGetFunction) &&
                    Find(library, "cuKernelSetAttribute", KernelSetAttribute) &&
                    Find(library, "cuLaunchKernelEx", LaunchKernelEx) &&
                    Find(library, "cuMemcpy2DAsync_v2", Memcpy2DAsync);
    if (!complete) return;
    if (CUresult code = Init(0); code != 0) problem = "cuInit failed: " + Text(code);
    if (GetVersion(&version) != 0) version = 0;
  }

  std::string Text(CUresult code) const {
    const char* name = nullptr;
    const char* text = nullptr;
    if (GetErrorName != nullptr) GetErrorName(code, &name);
    if (GetErrorString != nullptr) GetErrorString(code, &text);
    return std::string(name != nullptr ? name : "CUDA error") + " (" + std::to_string(code) +
           (text != nullptr ? std::string("): ") + text : std::string(")"));
  }

 private:
  template <typename F>
  bool Find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (function == nullptr) {
      problem = std::string("the CUDA driver lacks ") + name + ": a driver for CUDA 12 or newer is needed";
    }
    return function != nullptr;
  }
};

static std::mutex g_driver_mutex;
static std::string* g_driver_path = new std::string("libcuda.so.1");
static std::atomic<Driver*> g_driver{nullptr};

// Opened on first use and never closed.
static Driver& GetDriver() {
  Driver* driver = g_driver.load(std::memory_order_acquire);
  if (driver != nullptr) return *driver;
  std::lock_guard lock(g_driver_mutex);
  driver = g_driver.load(std::memory_order_relaxed);
  if (driver == nullptr) {
    driver = new Driver(g_driver_path->c_str());
    g_driver.store(driver, std::memory_order_release);
  }
  return *driver;
}

}  // namespace jcuts

#endif  // JCUTS_CUDA_DRIVER_H_
