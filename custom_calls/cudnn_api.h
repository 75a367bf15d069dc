// The part of cuDNN's interface that is used here (version 7 of its convolutions, which cuDNN 9 still has), opened at
// run time: neither cuDNN nor its headers are needed to build.

#ifndef JCUTS_CUDNN_API_H_
#define JCUTS_CUDNN_API_H_

#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

namespace jcuts {

// Nothing but an error text: empty means success.
using Problem = std::string;

using Status = int;  // cudnnStatus_t
using Handle = void*;
using Tensor = void*;
using Filter = void*;
using Conv = void*;

enum Kind : int { kForward = 0, kBackwardData = 1, kBackwardFilter = 2 };
enum Layout : int { kNchw = 0, kNhwc = 1 };                         // cudnnTensorFormat_t
enum DataType : int { kFloat = 0, kDouble = 1, kHalf = 2, kBfloat16 = 9 };  // cudnnDataType_t
enum Mode : int { kConvolution = 0, kCrossCorrelation = 1 };        // cudnnConvolutionMode_t

inline const char* KindName(int kind) {
  static const char* const names[] = {"forward", "backward-data", "backward-filter"};
  return kind >= 0 && kind <= 2 ? names[kind] : "unknown";
}

inline std::string AlgorithmName(int kind, int algorithm) {
  static const char* const forward[] = {"IMPLICIT_GEMM", "IMPLICIT_PRECOMP_GEMM", "GEMM",     "DIRECT",
                                        "FFT",           "FFT_TILING",            "WINOGRAD", "WINOGRAD_NONFUSED"};
  static const char* const data[] = {"ALGO_0", "ALGO_1", "FFT", "FFT_TILING", "WINOGRAD", "WINOGRAD_NONFUSED"};
  static const char* const filter[] = {"ALGO_0", "ALGO_1", "FFT", "ALGO_3", "WINOGRAD", "WINOGRAD_NONFUSED",
                                       "FFT_TILING"};
  const char* const* names = kind == kForward ? forward : kind == kBackwardData ? data : filter;
  int count = kind == kForward ? 8 : kind == kBackwardData ? 6 : 7;
  std::string number = std::to_string(algorithm);
  return algorithm >= 0 && algorithm < count ? std::string(names[algorithm]) + " (" + number + ")" : number;
}

inline std::string MathName(int math) {
  static const char* const names[] = {"DEFAULT_MATH", "TENSOR_OP_MATH", "TENSOR_OP_MATH_ALLOW_CONVERSION", "FMA_MATH"};
  return math >= 0 && math <= 3 ? names[math] : "math " + std::to_string(math);
}

struct Cudnn {
  std::string problem;  // why it cannot be used; empty if it can

  size_t (*GetVersion)() = nullptr;
  const char* (*GetErrorString)(Status) = nullptr;
  void (*GetLastErrorString)(char*, size_t) = nullptr;  // cuDNN 9; may be missing
  Status (*Create)(Handle*) = nullptr;
  Status (*SetStream)(Handle, void*) = nullptr;
  Status (*CreateTensor)(Tensor*) = nullptr;
  Status (*DestroyTensor)(Tensor) = nullptr;
  Status (*SetTensorNd)(Tensor, int type, int rank, const int* extents, const int* strides) = nullptr;
  Status (*CreateFilter)(Filter*) = nullptr;
  Status (*DestroyFilter)(Filter) = nullptr;
  Status (*SetFilterNd)(Filter, int type, int layout, int rank, const int* extents) = nullptr;
  Status (*CreateConv)(Conv*) = nullptr;
  Status (*DestroyConv)(Conv) = nullptr;
  Status (*SetConvNd)(Conv, int rank, const int* pad, const int* stride, const int* dilation, int mode,
                      int compute) = nullptr;
  Status (*SetMathType)(Conv, int) = nullptr;
  Status (*SetGroupCount)(Conv, int) = nullptr;
  // The operands of the three kernels in cuDNN's order: (x, w) -> y, (w, dy) -> dx, (x, dy) -> dw.
  using Space = Status (*)(Handle, void*, void*, Conv, void*, int algorithm, size_t* bytes);
  Space ForwardSpace = nullptr;  // (x, w, conv, y)
  Space DataSpace = nullptr;     // (w, dy, conv, dx)
  Space FilterSpace = nullptr;   // (x, dy, conv, dw)
  using Launch = Status (*)(Handle, const void* alpha, void*, const void*, void*, const void*, Conv, int algorithm,
                            void* workspace, size_t bytes, const void* beta, void*, void*);
  Launch Forward = nullptr;
  Launch Data = nullptr;
  Launch FilterGradient = nullptr;

  // path: a library; empty: the one that the process has open, else `fallback`, else what the loader finds.
  Cudnn(const std::string& path, const std::string& fallback) {
    constexpr const char* kName = "libcudnn.so.9";
    void* library = nullptr;
    std::string tried;
    auto open = [&](const char* name, int more) {
      if (library != nullptr || name[0] == '\0') return;
      library = dlopen(name, RTLD_NOW | RTLD_LOCAL | more);
      const char* why = library == nullptr && more == 0 ? dlerror() : nullptr;
      if (why != nullptr) tried += std::string(tried.empty() ? "" : "; ") + why;
    };
    if (!path.empty()) {
      open(path.c_str(), 0);
    } else {
      open(kName, RTLD_NOLOAD);
      open(fallback.c_str(), 0);
      open(kName, 0);
    }
    if (library == nullptr) {
      problem = "cuDNN cannot be opened: " + tried;
      return;
    }
    GetLastErrorString = reinterpret_cast<void (*)(char*, size_t)>(dlsym(library, "cudnnGetLastErrorString"));
    if (!(Find(library, "cudnnGetVersion", GetVersion) && Find(library, "cudnnGetErrorString", GetErrorString) &&
          Find(library, "cudnnCreate", Create) && Find(library, "cudnnSetStream", SetStream) &&
          Find(library, "cudnnCreateTensorDescriptor", CreateTensor) &&
          Find(library, "cudnnDestroyTensorDescriptor", DestroyTensor) &&
          Find(library, "cudnnSetTensorNdDescriptor", SetTensorNd) &&
          Find(library, "cudnnCreateFilterDescriptor", CreateFilter) &&
          Find(library, "cudnnDestroyFilterDescriptor", DestroyFilter) &&
          Find(library, "cudnnSetFilterNdDescriptor", SetFilterNd) &&
          Find(library, "cudnnCreateConvolutionDescriptor", CreateConv) &&
          Find(library, "cudnnDestroyConvolutionDescriptor", DestroyConv) &&
          Find(library, "cudnnSetConvolutionNdDescriptor", SetConvNd) &&
          Find(library, "cudnnSetConvolutionMathType", SetMathType) &&
          Find(library, "cudnnSetConvolutionGroupCount", SetGroupCount) &&
          Find(library, "cudnnGetConvolutionForwardWorkspaceSize", ForwardSpace) &&
          Find(library, "cudnnGetConvolutionBackwardDataWorkspaceSize", DataSpace) &&
          Find(library, "cudnnGetConvolutionBackwardFilterWorkspaceSize", FilterSpace) &&
          Find(library, "cudnnConvolutionForward", Forward) && Find(library, "cudnnConvolutionBackwardData", Data) &&
          Find(library, "cudnnConvolutionBackwardFilter", FilterGradient))) {
      return;
    }
    // Version 7's convolutions are deprecated: a cuDNN 10 that changes them has another soname and another check.
    size_t version = GetVersion();
    if (version < 8000) problem = "cuDNN " + std::to_string(version) + " is too old: 8.0 or newer is needed";
  }

  std::string Text(Status code) const {
    const char* name = GetErrorString != nullptr ? GetErrorString(code) : nullptr;
    std::string text = std::string(name != nullptr ? name : "cuDNN error") + " (" + std::to_string(code) + ")";
    if (GetLastErrorString == nullptr) return text;
    char more[512] = "";
    GetLastErrorString(more, sizeof(more));
    more[sizeof(more) - 1] = '\0';
    return more[0] == '\0' ? text : text + ": " + more;
  }

 private:
  template <typename F>
  bool Find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (function == nullptr) problem = std::string("this cuDNN lacks ") + name;
    return function != nullptr;
  }
};

static std::mutex g_cudnn_mutex;
static std::string* g_cudnn_path = new std::string;
static std::string* g_cudnn_fallback = new std::string;
static std::atomic<Cudnn*> g_cudnn{nullptr};

// Opened on first use and never closed.
static Cudnn& GetCudnn() {
  Cudnn* cudnn = g_cudnn.load(std::memory_order_acquire);
  if (cudnn != nullptr) return *cudnn;
  std::lock_guard lock(g_cudnn_mutex);
  cudnn = g_cudnn.load(std::memory_order_relaxed);
  if (cudnn == nullptr) {
    cudnn = new Cudnn(*g_cudnn_path, *g_cudnn_fallback);
    g_cudnn.store(cudnn, std::memory_order_release);
  }
  return *cudnn;
}

}  // namespace jcuts

#endif  // JCUTS_CUDNN_API_H_
