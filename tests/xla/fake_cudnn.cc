// A cuDNN for tests: computes in host memory by plain loops, records what it is asked, and fails on demand.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {
std::string* g_log = new std::string;
std::string* g_fail = new std::string;
int g_created = 0, g_destroyed = 0;

struct Tensor { int type = 0, rank = 0; int size[8] = {}, stride[8] = {}; };
struct Conv { int rank = 0, pad[6] = {}, step[6] = {}, dilation[6] = {}, mode = 0, compute = 0, math = 0, groups = 1; };

float HalfToFloat(uint16_t h) {
  uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023, bits;
  if (exponent == 0) {
    float f = mantissa * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -f : f;
  }
  bits = sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | mantissa << 13;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
uint16_t FloatToHalf(float f) {  // nearest, by search among neighbours: slow and simple
  uint16_t sign = f < 0 ? 0x8000 : 0;
  float a = f < 0 ? -f : f;
  int low = 0, high = 0x7C00;
  while (high - low > 1) {
    int middle = (low + high) / 2;
    (HalfToFloat(static_cast<uint16_t>(middle)) <= a ? low : high) = middle;
  }
  float below = a - HalfToFloat(static_cast<uint16_t>(low)), above = HalfToFloat(static_cast<uint16_t>(high)) - a;
  return sign | static_cast<uint16_t>(above < below || (above == below && (low & 1)) ? high : low);
}
double Load(const void* data, int type, int64_t i) {
  if (type == 0) return static_cast<const float*>(data)[i];
  if (type == 1) return static_cast<const double*>(data)[i];
  uint16_t raw = static_cast<const uint16_t*>(data)[i];
  if (type == 2) return HalfToFloat(raw);
  uint32_t bits = static_cast<uint32_t>(raw) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
void Store(void* data, int type, int64_t i, double value) {
  if (type == 0) { static_cast<float*>(data)[i] = static_cast<float>(value); return; }
  if (type == 1) { static_cast<double*>(data)[i] = value; return; }
  float f = static_cast<float>(value);
  if (type == 2) { static_cast<uint16_t*>(data)[i] = FloatToHalf(f); return; }
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  bits += 0x7FFF + ((bits >> 16) & 1);
  static_cast<uint16_t*>(data)[i] = static_cast<uint16_t>(bits >> 16);
}

// Every (n, k, o...) with every (c, r...): calls visit(index of x, of w, of y).
template <typename Visit>
void Walk(const Tensor& x, const Tensor& w, const Tensor& y, const Conv& conv, const Visit& visit) {
  int rank = conv.rank, cg = w.size[1], kg = w.size[0] / conv.groups;
  int64_t outs = 1, taps = 1;
  for (int d = 0; d < rank; ++d) outs *= y.size[2 + d], taps *= w.size[2 + d];
  for (int n = 0; n < x.size[0]; ++n)
    for (int k = 0; k < w.size[0]; ++k)
      for (int64_t o = 0; o < outs; ++o)
        for (int64_t t = 0; t < taps; ++t) {
          int64_t xi = int64_t{n} * x.stride[0], wi = int64_t{k} * w.stride[0];
          int64_t yi = int64_t{n} * y.stride[0] + int64_t{k} * y.stride[1];
          int64_t left = o, tap = t;
          bool inside = true;
          for (int d = rank - 1; d >= 0; --d) {
            int place = static_cast<int>(left % y.size[2 + d]), r = static_cast<int>(tap % w.size[2 + d]);
            left /= y.size[2 + d], tap /= w.size[2 + d];
            int at = place * conv.step[d] + r * conv.dilation[d] - conv.pad[d];
            if (at < 0 || at >= x.size[2 + d]) { inside = false; break; }
            int mine = conv.mode == 1 ? r : w.size[2 + d] - 1 - r;
            xi += int64_t{at} * x.stride[2 + d], wi += int64_t{mine} * w.stride[2 + d];
            yi += int64_t{place} * y.stride[2 + d];
          }
          if (!inside) continue;
          for (int c = 0; c < cg; ++c)
            visit(xi + int64_t{k / kg * cg + c} * x.stride[1], wi + int64_t{c} * w.stride[1], yi);
        }
}

int64_t Extent(const Tensor& t) {
  int64_t last = 1;
  for (int d = 0; d < t.rank; ++d) last += int64_t{t.size[d] - 1} * t.stride[d];
  return last;
}


// Sums of products in double, then one rounding.
template <typename Pick>
void Compute(const Tensor& x, const Tensor& w, const Tensor& y, const Conv& conv, const Tensor& into, void* out,
             const void* alpha, const void* beta, const Pick& pick) {
  auto scale = [&](const void* v) { return into.type == 1 ? *static_cast<const double*>(v) : *static_cast<const float*>(v); };
  std::vector<double> sums(static_cast<size_t>(Extent(into)), 0.0);
  Walk(x, w, y, conv, [&](int64_t xi, int64_t wi, int64_t yi) { pick(sums, xi, wi, yi); });
  double a = scale(alpha), b = scale(beta);
  for (size_t i = 0; i < sums.size(); ++i) {
    int64_t at = static_cast<int64_t>(i);
    Store(out, into.type, at, a * sums[i] + (b != 0 ? b * Load(out, into.type, at) : 0.0));
  }
}

int Fails(const char* name) { return *g_fail == name ? 5000 : 0; }
// Less for fewer outputs than FAKE_CUDNN_OUTPUTS, where that is set.
size_t Space(int algorithm, const Tensor& x, const Tensor& y) {
  const char* whole = std::getenv("FAKE_CUDNN_OUTPUTS");
  size_t all = size_t{4096} * algorithm * x.size[0];
  return whole == nullptr ? all : all * static_cast<size_t>(y.size[1]) / static_cast<size_t>(std::atoi(whole));
}
bool Unsupported(int kind, int algorithm) { return algorithm < 0 || algorithm > 7 || (kind == 0 && algorithm == 3); }
// The image must be what the descriptors say the result is of.
bool Fits(const Tensor& x, const Tensor& w, const Tensor& y, const Conv& c) {
  for (int d = 0; d < c.rank; ++d) {
    int span = (w.size[2 + d] - 1) * c.dilation[d] + 1;
    if ((x.size[2 + d] + 2 * c.pad[d] - span) / c.step[d] + 1 != y.size[2 + d]) return false;
  }
  return x.size[0] == y.size[0] && x.size[1] == w.size[1] * c.groups && y.size[1] == w.size[0];
}
int Begin(const char* name, int kind, const Tensor& x, const Tensor& w, const Tensor& y, const Conv& c, int algorithm,
          void* space, size_t bytes, const void* beta, const void* image, const void* result) {
  char text[200];
  double b = x.type == 1 ? *static_cast<const double*>(beta) : *static_cast<const float*>(beta);
  std::snprintf(text, sizeof text, "%s n=%d k=%d algorithm=%d math=%d compute=%d beta=%g space=%zu at=%zu,%zu;", name,
                x.size[0], y.size[1], algorithm, c.math, c.compute, b, bytes, reinterpret_cast<size_t>(image) % 16,
                reinterpret_cast<size_t>(result) % 16);
  *g_log += text;
  const char* crash = std::getenv("FAKE_CUDNN_CRASH");
  if (crash != nullptr && std::atoi(crash) == algorithm) std::abort();
  if (int failed = Fails(name)) return failed;
  if (Unsupported(kind, algorithm)) return 3000;
  if (!Fits(x, w, y, c)) return 2008;
  if (bytes < Space(algorithm, x, y)) return 2006;
  if (bytes > 0) std::memset(space, 0xAB, Space(algorithm, x, y));  // it must be ours to write
  return 0;
}
int Ask(int kind, const Tensor& x, const Tensor& w, const Tensor& y, const Conv& c, int algorithm, size_t* bytes) {
  if (int failed = Fails("WorkspaceSize")) return failed;
  if (Unsupported(kind, algorithm)) return 3000;
  if (!Fits(x, w, y, c)) return 2008;
  *bytes = Space(algorithm, x, y);
  return 0;
}
Tensor& T(void* t) { return *static_cast<Tensor*>(t); }
Conv& C(void* c) { return *static_cast<Conv*>(c); }
template <typename X>
int New(void** made) { *made = new X; ++g_created; return 0; }
template <typename X>
int Delete(void* object) { delete static_cast<X*>(object); ++g_destroyed; return 0; }
}  // namespace

extern "C" {
int jcuts_host_cudnn() { return 1; }
const char* fake_log() { return g_log->c_str(); }
void fake_clear() { g_log->clear(); }
void fake_fail(const char* name) { *g_fail = name; }
int fake_alive() { return g_created - g_destroyed; }

size_t cudnnGetVersion() {
  const char* text = std::getenv("FAKE_CUDNN_VERSION");
  return text != nullptr ? static_cast<size_t>(std::atoi(text)) : 91900;
}
const char* cudnnGetErrorString(int code) {
  return code == 3000 ? "CUDNN_STATUS_NOT_SUPPORTED" : code == 2006 ? "CUDNN_STATUS_BAD_PARAM_SIZE_INSUFFICIENT"
         : code == 2008 ? "CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH" : code == 5000 ? "CUDNN_STATUS_EXECUTION_FAILED"
                                                                                : "CUDNN_STATUS_OTHER";
}
void cudnnGetLastErrorString(char* text, size_t size) { std::snprintf(text, size, "as the test asked"); }
int cudnnCreate(void** handle) { *g_log += "Create;"; *handle = g_log; return Fails("Create"); }
int cudnnSetStream(void*, void*) { *g_log += "SetStream;"; return Fails("SetStream"); }
int cudnnCreateTensorDescriptor(void** t) { return New<Tensor>(t); }
int cudnnDestroyTensorDescriptor(void* t) { return Delete<Tensor>(t); }
int cudnnCreateFilterDescriptor(void** t) { return New<Tensor>(t); }
int cudnnDestroyFilterDescriptor(void* t) { return Delete<Tensor>(t); }
int cudnnCreateConvolutionDescriptor(void** c) { return New<Conv>(c); }
int cudnnDestroyConvolutionDescriptor(void* c) { return Delete<Conv>(c); }
int cudnnSetTensorNdDescriptor(void* t, int type, int rank, const int* sizes, const int* strides) {
  T(t).type = type, T(t).rank = rank;
  for (int d = 0; d < rank; ++d) T(t).size[d] = sizes[d], T(t).stride[d] = strides[d];
  return 0;
}
int cudnnSetFilterNdDescriptor(void* t, int type, int layout, int rank, const int* sizes) {
  Tensor& f = T(t);
  f.type = type, f.rank = rank;
  for (int d = 0; d < rank; ++d) f.size[d] = sizes[d];
  int step = 1;
  if (layout == 1) f.stride[1] = 1, step = sizes[1];
  for (int d = rank - 1; d >= 2; --d) f.stride[d] = step, step *= sizes[d];
  if (layout == 0) f.stride[1] = step, step *= sizes[1];
  f.stride[0] = step;
  return 0;
}
int cudnnSetConvolutionNdDescriptor(void* c, int rank, const int* pad, const int* step, const int* dilation, int mode,
                                    int compute) {
  C(c).rank = rank, C(c).mode = mode, C(c).compute = compute;
  for (int d = 0; d < rank; ++d) C(c).pad[d] = pad[d], C(c).step[d] = step[d], C(c).dilation[d] = dilation[d];
  return Fails("SetConvolution");
}
int cudnnSetConvolutionMathType(void* c, int math) { C(c).math = math; return 0; }
int cudnnSetConvolutionGroupCount(void* c, int groups) { C(c).groups = groups; return 0; }

int cudnnGetConvolutionForwardWorkspaceSize(void*, void* x, void* w, void* c, void* y, int algorithm, size_t* bytes) {
  return Ask(0, T(x), T(w), T(y), C(c), algorithm, bytes);
}
int cudnnGetConvolutionBackwardDataWorkspaceSize(void*, void* w, void* y, void* c, void* x, int algorithm,
                                                 size_t* bytes) {
  return Ask(1, T(x), T(w), T(y), C(c), algorithm, bytes);
}
int cudnnGetConvolutionBackwardFilterWorkspaceSize(void*, void* x, void* y, void* c, void* w, int algorithm,
                                                   size_t* bytes) {
  return Ask(2, T(x), T(w), T(y), C(c), algorithm, bytes);
}
int cudnnConvolutionForward(void*, const void* alpha, void* xd, const void* x, void* wd, const void* w, void* c,
                            int algorithm, void* space, size_t bytes, const void* beta, void* yd, void* y) {
  if (int s = Begin("Forward", 0, T(xd), T(wd), T(yd), C(c), algorithm, space, bytes, beta, x, y)) return s;
  Compute(T(xd), T(wd), T(yd), C(c), T(yd), y, alpha, beta, [&](auto& sums, int64_t xi, int64_t wi, int64_t yi) {
    sums[static_cast<size_t>(yi)] += Load(x, T(xd).type, xi) * Load(w, T(wd).type, wi);
  });
  return 0;
}
int cudnnConvolutionBackwardData(void*, const void* alpha, void* wd, const void* w, void* yd, const void* y, void* c,
                                 int algorithm, void* space, size_t bytes, const void* beta, void* xd, void* x) {
  if (int s = Begin("BackwardData", 1, T(xd), T(wd), T(yd), C(c), algorithm, space, bytes, beta, x, y)) return s;
  Compute(T(xd), T(wd), T(yd), C(c), T(xd), x, alpha, beta, [&](auto& sums, int64_t xi, int64_t wi, int64_t yi) {
    sums[static_cast<size_t>(xi)] += Load(y, T(yd).type, yi) * Load(w, T(wd).type, wi);
  });
  return 0;
}
int cudnnConvolutionBackwardFilter(void*, const void* alpha, void* xd, const void* x, void* yd, const void* y, void* c,
                                   int algorithm, void* space, size_t bytes, const void* beta, void* wd, void* w) {
  if (int s = Begin("BackwardFilter", 2, T(xd), T(wd), T(yd), C(c), algorithm, space, bytes, beta, x, y)) return s;
  Compute(T(xd), T(wd), T(yd), C(c), T(wd), w, alpha, beta, [&](auto& sums, int64_t xi, int64_t wi, int64_t yi) {
    sums[static_cast<size_t>(wi)] += Load(x, T(xd).type, xi) * Load(y, T(yd).type, yi);
  });
  return 0;
}
}
