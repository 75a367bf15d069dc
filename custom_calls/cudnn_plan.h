// One convolution kernel over pieces of its batch: what is asked for, descriptors, and the launches.

#ifndef JCUTS_CUDNN_PLAN_H_
#define JCUTS_CUDNN_PLAN_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "cudnn_api.h"

namespace jcuts {

constexpr int kMostDevices = 64;
constexpr int kHost = -1;  // a library that computes in host memory (tests): no driver, no context
constexpr int64_t kMostParts = 1 << 20;

// A device's cuDNN handle.  cuDNN allows one thread at a time to use a handle.
struct DeviceHandle {
  std::mutex mutex;
  Handle handle = nullptr;
  CUcontext context = nullptr;
};

// Made once per device and never destroyed: executables may run until the process ends.
class Handles {
 public:
  Problem Get(int device, DeviceHandle*& found) {
    if (device < kHost || device >= kMostDevices) return "device " + std::to_string(device) + " is out of range";
    std::atomic<DeviceHandle*>& slot = slots_[device + 1];
    found = slot.load(std::memory_order_acquire);
    if (found != nullptr) return {};
    Cudnn& cudnn = GetCudnn();
    if (!cudnn.problem.empty()) return cudnn.problem;
    std::lock_guard lock(mutex_);
    found = slot.load(std::memory_order_relaxed);
    if (found != nullptr) return {};
    auto made = std::make_unique<DeviceHandle>();
    if (device != kHost) {
      Driver& driver = GetDriver();
      if (!driver.problem.empty()) return driver.problem;
      CUdevice handle = 0;
      CUresult code = driver.DeviceGet(&handle, device);
      // Kept for the life of the process, as XLA keeps it.
      if (code == 0) code = driver.PrimaryRetain(&made->context, handle);
      if (code == 0) code = driver.CtxPush(made->context);
      if (code != 0) return driver.Text(code);
    }
    Status status = cudnn.Create(&made->handle);
    if (device != kHost) {
      CUcontext popped = nullptr;
      GetDriver().CtxPop(&popped);
    }
    if (status != 0) return "cudnnCreate failed: " + cudnn.Text(status);
    found = made.release();
    slot.store(found, std::memory_order_release);
    return {};
  }

 private:
  std::mutex mutex_;
  std::atomic<DeviceHandle*> slots_[kMostDevices + 1] = {};
};

static Handles& GetHandles() {
  static Handles* handles = new Handles;
  return *handles;
}

// The device's context is current while this lives.
class InContext {
 public:
  explicit InContext(const DeviceHandle& handle) : pushed_(handle.context != nullptr) {
    if (pushed_) code_ = GetDriver().CtxPush(handle.context);
  }
  ~InContext() {
    CUcontext popped = nullptr;
    if (pushed_ && code_ == 0) GetDriver().CtxPop(&popped);
  }
  Problem problem() const { return code_ == 0 ? Problem() : GetDriver().Text(code_); }

 private:
  bool pushed_;
  CUresult code_ = 0;
};

// What is convolved.  As integers (`FromNumbers`): kind, layout, data type, mode, groups, accumulate, batch, channels,
// outputs, spatial rank; then per spatial dimension: extent of the image, of the result, of the window, stride, padding
// on both sides, dilation.
struct Shape {
  int kind, layout, type, mode, groups;
  bool accumulate;
  int64_t batch;
  int channels, outputs;
  std::vector<int> image, result, window, stride, padding, dilation;

  Problem FromNumbers(const int64_t* numbers, size_t count) {
    if (count < 10 || numbers[9] < 2 || numbers[9] > 3 || count != 10 + 6 * static_cast<size_t>(numbers[9])) {
      return "the description of the convolution is malformed";
    }
    for (size_t i = 0; i < count; ++i) {
      if (numbers[i] < 0 || numbers[i] > INT32_MAX) return "a number of the convolution is out of range";
    }
    kind = static_cast<int>(numbers[0]), layout = static_cast<int>(numbers[1]), type = static_cast<int>(numbers[2]);
    mode = static_cast<int>(numbers[3]), groups = static_cast<int>(numbers[4]), accumulate = numbers[5] != 0;
    batch = numbers[6], channels = static_cast<int>(numbers[7]), outputs = static_cast<int>(numbers[8]);
    bool known = type == kFloat || type == kDouble || type == kHalf || type == kBfloat16;
    if (kind > kBackwardFilter || layout > kNhwc || mode > kCrossCorrelation || !known) {
      return "the kind, layout, mode or data type of the convolution is unknown";
    }
    if (groups < 1 || channels < 1 || outputs < 1 || batch < 1 || channels % groups != 0 || outputs % groups != 0) {
      return "batch, channels and groups do not fit together";
    }
    for (size_t d = 0; d < static_cast<size_t>(numbers[9]); ++d) {
      const int64_t* at = numbers + 10 + 6 * d;
      std::vector<int>* const fields[] = {&image, &result, &window, &stride, &padding, &dilation};
      for (int i = 0; i < 6; ++i) fields[i]->push_back(static_cast<int>(at[i]));
    }
    return {};
  }

  int64_t ElementBytes() const { return type == kDouble ? 8 : type == kFloat ? 4 : 2; }
  int64_t Bytes(const std::vector<int>& extents, int64_t outer) const {
    for (int extent : extents) outer *= extent;
    return outer * ElementBytes();
  }
  int64_t ImageBytes() const { return Bytes(image, channels); }    // of one sample of x or dx
  int64_t ResultBytes() const { return Bytes(result, outputs); }  // of one sample of y or dy
  int64_t FilterBytes() const { return Bytes(window, int64_t{outputs} * (channels / groups)); }
  // Bytes of the operands and of the result, in the order of the call.
  std::array<int64_t, 3> BufferBytes() const {
    int64_t x = batch * ImageBytes(), y = batch * ResultBytes(), w = FilterBytes();
    if (kind == kForward) return {x, w, y};
    if (kind == kBackwardData) return {y, w, x};
    return {x, y, w};
  }
};

// `count` micro-batches of `batch` samples, one after the other; each in `slices` calls of outputs / slices channels of
// the result, whose filters take a workspace of their own size.  A slice of several samples is packed: its channels are
// copied into, or from, the beginning of the workspace (cuDNN would do so itself, at a tenth of the speed).
struct Part {
  int64_t count, batch;
  int algorithm, math, compute;
  int64_t slices;
};
constexpr size_t kPartNumbers = 6;

// A descriptor that is destroyed with its owner.
class Descriptor {
 public:
  Descriptor() = default;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (pointer_ != nullptr) destroy_(pointer_);
  }
  Status Make(Status (*create)(void**), Status (*destroy)(void*)) {
    destroy_ = destroy;
    return create(&pointer_);
  }
  void* get() const { return pointer_; }

 private:
  void* pointer_ = nullptr;
  Status (*destroy_)(void*) = nullptr;
};

class Plan {
 public:
  std::string layer;
  Shape shape;
  std::vector<Part> parts;
  int64_t workspace = 0;  // bytes that a caller provides

  // Six numbers per part: count, batch, algorithm, math type, compute type, slices.
  Problem FromNumbers(const int64_t* convolution, size_t size, const int64_t* numbers, size_t count) {
    if (Problem problem = shape.FromNumbers(convolution, size); !problem.empty()) return What(problem);
    int64_t samples = 0;
    for (size_t i = 0; i + kPartNumbers <= count; i += kPartNumbers) {
      const int64_t* n = numbers + i;
      if (n[0] < 1 || n[1] < 1 || n[0] > kMostParts || n[1] > shape.batch) return What("a micro-batch is out of range");
      bool whole = n[5] == 1 || (n[5] > 1 && shape.outputs % n[5] == 0 && shape.groups == 1 && shape.layout == kNchw);
      if (!whole) return What("its channels cannot be cut into " + std::to_string(n[5]) + " slices");
      parts.push_back({n[0], n[1], static_cast<int>(n[2]), static_cast<int>(n[3]), static_cast<int>(n[4]), n[5]});
      samples += n[0] * n[1];
    }
    if (count % kPartNumbers != 0 || samples != shape.batch) {
      return What("micro-batches hold " + std::to_string(samples) + " samples, the batch " +
                  std::to_string(shape.batch));
    }
    return {};
  }

  bool IsReady(int device) const {
    return device >= kHost && device < kMostDevices && ready_[device + 1].load(std::memory_order_acquire) != nullptr;
  }

  // Makes handle and descriptors, and checks that the workspace is large enough on this device.
  Problem Prepare(int device) {
    if (IsReady(device)) return {};
    DeviceHandle* handle = nullptr;
    if (Problem problem = GetHandles().Get(device, handle); !problem.empty()) return What(problem);
    std::lock_guard lock(mutex_);
    if (IsReady(device)) return {};
    Problem problem = made_.empty() ? Describe() : Problem();
    if (problem.empty()) {
      InContext context(*handle);
      problem = context.problem();
      std::lock_guard use(handle->mutex);
      needed_ = 0;
      for (size_t i = 0; i < parts.size() && problem.empty(); ++i) problem = CheckSpace(*handle, i);
    } else {
      made_.clear();
    }
    if (!problem.empty()) return What(problem);
    ready_[device + 1].store(handle, std::memory_order_release);
    return {};
  }

  // Bytes that the largest part needs; known after `Prepare`.
  int64_t needed() const { return needed_; }

  // Launches every micro-batch on a stream; `b` is the second operand in the order of the call (x w | dy w | x dy).
  Problem Run(int device, void* stream, const void* a, const void* b, void* out, void* space) const {
    if (!IsReady(device)) return What("it was not initialised on device " + std::to_string(device));
    DeviceHandle& handle = *ready_[device + 1].load(std::memory_order_acquire);
    InContext context(handle);
    if (Problem problem = context.problem(); !problem.empty()) return What(problem);
    Cudnn& cudnn = GetCudnn();
    std::lock_guard use(handle.mutex);
    if (device != kHost) {
      if (Status status = cudnn.SetStream(handle.handle, stream); status != 0) {
        return What("cudnnSetStream failed: " + cudnn.Text(status));
      }
    }
    int64_t start = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      for (int64_t k = 0; k < parts[i].count; ++k, start += parts[i].batch) {
        for (int64_t slice = 0; slice < parts[i].slices; ++slice) {
          Slice one = Of(i, start, slice, a, b, out, space);
          CUresult copied = 0;
          if (one.packed != nullptr && (shape.kind != kForward || shape.accumulate)) {
            copied = CopyRows(device, stream, i, one.result, one.packed, false);
          }
          Status status = copied != 0 ? 0 : Launch(cudnn, handle.handle, i, one);
          if (copied == 0 && status == 0 && one.packed != nullptr && shape.kind == kForward) {
            copied = CopyRows(device, stream, i, one.result, one.packed, true);
          }
          std::string why = copied != 0 ? GetDriver().Text(copied) : status != 0 ? cudnn.Text(status) : std::string();
          if (!why.empty()) return What(PartText(i) + " at sample " + std::to_string(start) + " failed: " + why);
        }
      }
    }
    return {};
  }

  Problem What(const std::string& what) const {
    return "convolution " + layer + " (" + KindName(shape.kind) + "): " + what;
  }

 private:
  struct Made {
    Descriptor image, result, filter, conv;
  };

  std::string PartText(size_t i) const {
    const Part& part = parts[i];
    return "algorithm " + AlgorithmName(shape.kind, part.algorithm) + " with " + MathName(part.math) +
           " for a micro-batch of " + std::to_string(part.batch) +
           (part.slices > 1 ? " in " + std::to_string(part.slices) + " slices" : std::string());
  }

  Status DescribeTensor(Descriptor& made, int64_t batch, int channels, const std::vector<int>& extents) const {
    Cudnn& cudnn = GetCudnn();
    std::vector<int> sizes = {static_cast<int>(batch), channels};
    sizes.insert(sizes.end(), extents.begin(), extents.end());
    std::vector<int> strides(sizes.size());
    int64_t step = 1;
    if (shape.layout == kNhwc) strides[1] = 1, step = channels;
    for (size_t d = sizes.size() - 1; d >= 2; --d) strides[d] = static_cast<int>(step), step *= sizes[d];
    if (shape.layout == kNchw) strides[1] = static_cast<int>(step), step *= channels;
    strides[0] = static_cast<int>(step);
    Status status = made.Make(cudnn.CreateTensor, cudnn.DestroyTensor);
    if (status != 0) return status;
    return cudnn.SetTensorNd(made.get(), shape.type, static_cast<int>(sizes.size()), sizes.data(), strides.data());
  }

  Problem Describe() {
    Cudnn& cudnn = GetCudnn();
    int rank = static_cast<int>(shape.window.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      auto made = std::make_unique<Made>();
      int outputs = static_cast<int>(shape.outputs / parts[i].slices);
      std::vector<int> sizes = {outputs, shape.channels / shape.groups};
      sizes.insert(sizes.end(), shape.window.begin(), shape.window.end());
      Status status = made->filter.Make(cudnn.CreateFilter, cudnn.DestroyFilter);
      if (status == 0) status = cudnn.SetFilterNd(made->filter.get(), shape.type, shape.layout, rank + 2, sizes.data());
      if (status == 0) status = DescribeTensor(made->image, parts[i].batch, shape.channels, shape.image);
      if (status == 0) status = DescribeTensor(made->result, parts[i].batch, outputs, shape.result);
      if (status == 0) status = made->conv.Make(cudnn.CreateConv, cudnn.DestroyConv);
      Conv conv = made->conv.get();
      if (status == 0) {
        status = cudnn.SetConvNd(conv, rank, shape.padding.data(), shape.stride.data(), shape.dilation.data(),
                                 shape.mode, parts[i].compute);
      }
      if (status == 0) status = cudnn.SetMathType(conv, parts[i].math);
      if (status == 0) status = cudnn.SetGroupCount(conv, shape.groups);
      made_.push_back(std::move(made));
      if (status != 0) return "describing " + PartText(i) + " failed: " + cudnn.Text(status);
    }
    return {};
  }

  Problem CheckSpace(const DeviceHandle& handle, size_t i) {
    Cudnn& cudnn = GetCudnn();
    void *x = made_[i]->image.get(), *y = made_[i]->result.get(), *w = made_[i]->filter.get();
    void* conv = made_[i]->conv.get();
    int algorithm = parts[i].algorithm;
    size_t bytes = 0;
    Status status = 0;
    if (shape.kind == kForward) status = cudnn.ForwardSpace(handle.handle, x, w, conv, y, algorithm, &bytes);
    if (shape.kind == kBackwardData) status = cudnn.DataSpace(handle.handle, w, y, conv, x, algorithm, &bytes);
    if (shape.kind == kBackwardFilter) status = cudnn.FilterSpace(handle.handle, x, y, conv, w, algorithm, &bytes);
    if (status != 0) return PartText(i) + " is not possible: " + cudnn.Text(status);
    bytes += static_cast<size_t>(PackedBytes(i));
    if (static_cast<int64_t>(bytes) > needed_) needed_ = static_cast<int64_t>(bytes);
    if (workspace >= 0 && static_cast<int64_t>(bytes) > workspace) {
      return PartText(i) + " needs " + std::to_string(bytes) + " bytes of workspace, the call provides " +
             std::to_string(workspace) + ": measure again with this cuDNN (version " +
             std::to_string(cudnn.GetVersion()) + ")";
    }
    return {};
  }

  // One call: where its samples, and its channels of the result, begin; `packed`: where they are instead, or null.
  struct Slice {
    char *image, *filter, *result, *packed, *space;
    int64_t start, slice;
  };

  // Bytes in front of cuDNN's own workspace; one sample's channels are together anyway.
  int64_t PackedBytes(size_t i) const {
    const Part& part = parts[i];
    if (part.slices == 1 || part.batch == 1) return 0;
    return (part.batch * (shape.ResultBytes() / part.slices) + 255) / 256 * 256;
  }

  Slice Of(size_t i, int64_t start, int64_t slice, const void* a, const void* b, void* out, void* space) const {
    auto place = [](const void* base) { return const_cast<char*>(static_cast<const char*>(base)); };
    const int64_t slices = parts[i].slices, packed = PackedBytes(i);
    bool forward = shape.kind == kForward, data = shape.kind == kBackwardData;
    Slice one;
    one.start = start, one.slice = slice;
    one.image = place(data ? out : a) + start * shape.ImageBytes();
    one.filter = place(shape.kind == kBackwardFilter ? out : b) + slice * (shape.FilterBytes() / slices);
    one.result = place(forward ? out : data ? a : b) + start * shape.ResultBytes();
    one.result += slice * (shape.ResultBytes() / slices);
    one.packed = packed > 0 ? place(space) : nullptr;
    one.space = space == nullptr ? nullptr : place(space) + packed;
    return one;
  }

  // Between a slice's place in the whole result and its packed copy.
  CUresult CopyRows(int device, void* stream, size_t i, char* whole, char* packed, bool back) const {
    const size_t pitch = static_cast<size_t>(shape.ResultBytes()), width = pitch / static_cast<size_t>(parts[i].slices);
    const size_t height = static_cast<size_t>(parts[i].batch);
    if (device != kHost) {
      RowsCopy copy = {};
      copy.source_type = copy.target_type = 2;
      copy.source = back ? packed : whole, copy.target = back ? whole : packed;
      copy.source_pitch = back ? width : pitch, copy.target_pitch = back ? pitch : width;
      copy.width = width, copy.height = height;
      return GetDriver().Memcpy2DAsync(&copy, stream);
    }
    for (size_t n = 0; n < height; ++n) {
      std::memcpy(back ? whole + n * pitch : packed + n * width, back ? packed + n * width : whole + n * pitch, width);
    }
    return 0;
  }

  Status Launch(Cudnn& cudnn, Handle handle, size_t i, const Slice& one) const {
    static const float kFloats[] = {0.0f, 1.0f};
    static const double kDoubles[] = {0.0, 1.0};
    auto scale = [&](bool add) -> const void* {
      return shape.type == kDouble ? static_cast<const void*>(&kDoubles[add]) : &kFloats[add];
    };
    const Made& made = *made_[i];
    void *x = made.image.get(), *y = made.result.get(), *w = made.filter.get(), *conv = made.conv.get();
    char* result = one.packed != nullptr ? one.packed : one.result;
    int algorithm = parts[i].algorithm;
    size_t bytes = static_cast<size_t>((workspace < 0 ? needed_ : workspace) - PackedBytes(i));
    if (shape.kind == kForward) {
      return cudnn.Forward(handle, scale(true), x, one.image, w, one.filter, conv, algorithm, one.space, bytes,
                           scale(shape.accumulate), y, result);
    }
    if (shape.kind == kBackwardData) {
      // Every output channel has its share in the gradient of the image: slices add up.
      return cudnn.Data(handle, scale(true), w, one.filter, y, result, conv, algorithm, one.space, bytes,
                        scale(shape.accumulate || one.slice > 0), x, one.image);
    }
    // Gradients of the pieces add up: all but the first go onto what is there, whatever the first one does.
    return cudnn.FilterGradient(handle, scale(true), x, one.image, y, result, conv, algorithm, one.space, bytes,
                                scale(shape.accumulate || one.start > 0), w, one.filter);
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Made>> made_;
  int64_t needed_ = 0;
  std::atomic<DeviceHandle*> ready_[kMostDevices + 1] = {};
};

}  // namespace jcuts

#endif  // JCUTS_CUDNN_PLAN_H_
