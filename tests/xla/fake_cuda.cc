// A CUDA driver for tests: records what it is asked, runs nothing, and fails on demand.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

static std::string* g_log = new std::string;
static std::string* g_fail = new std::string;
static int Note(const char* name, const std::string& more = "") {
  *g_log += std::string(name) + more + ";";
  return *g_fail == name ? 700 : 0;
}

struct Config {
  unsigned grid[3], block[3], shared;
  void* stream;
  void* attributes;
  unsigned count;
};

extern "C" {
const char* fake_log() { return g_log->c_str(); }
void fake_clear() { g_log->clear(); }
void fake_fail(const char* name) { *g_fail = name; }

int cuDriverGetVersion(int* version) {
  const char* text = std::getenv("FAKE_DRIVER_VERSION");
  *version = text != nullptr ? std::atoi(text) : 13000;
  return 0;
}
int cuInit(unsigned) { return std::getenv("FAKE_NO_DEVICE") != nullptr ? 100 : 0; }
int cuGetErrorName(int code, const char** text) {
  *text = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_SUCCESS";
  return 0;
}
int cuGetErrorString(int code, const char** text) { *text = code == 100 ? "no device" : "an error"; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { *context = g_log; return 0; }
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuCtxPopCurrent_v2(void**) { return 0; }
int cuLibraryLoadData(void** library, const void* code, void*, void*, unsigned, void*, void*, unsigned) {
  *library = g_log;
  return Note("cuLibraryLoadData", std::string(" ") + static_cast<const char*>(code));
}
int cuLibraryUnload(void*) { return Note("cuLibraryUnload"); }
int cuLibraryGetKernel(void** kernel, void*, const char* name) {
  *kernel = strdup(name);
  return Note("cuLibraryGetKernel", std::string(" ") + name);
}
int cuKernelGetFunction(void** function, void* kernel) { *function = kernel; return Note("cuKernelGetFunction"); }
int cuKernelSetAttribute(int attribute, int value, void*, int device) {
  char text[64];
  std::snprintf(text, sizeof text, " %d=%d on %d", attribute, value, device);
  return Note("cuKernelSetAttribute", text);
}
struct Rows {
  size_t source_x, source_y;
  int source_type;
  const void *source_host, *source;
  void* source_array;
  size_t source_pitch, target_x, target_y;
  int target_type;
  void *target_host, *target, *target_array;
  size_t target_pitch, width, height;
};
int cuMemcpy2DAsync_v2(const Rows* rows, void* stream) {  // memory is the host's: it does copy
  if (rows->source_type != 2 || rows->target_type != 2) return 1;
  if (rows->source_x + rows->source_y + rows->target_x + rows->target_y != 0) return 1;
  for (size_t k = 0; k < rows->height; ++k) {
    std::memcpy(static_cast<char*>(rows->target) + k * rows->target_pitch,
                static_cast<const char*>(rows->source) + k * rows->source_pitch, rows->width);
  }
  char text[96];
  std::snprintf(text, sizeof text, " %zu x %zu B on %zu", rows->height, rows->width, reinterpret_cast<size_t>(stream));
  return Note("cuMemcpy2DAsync", text);
}
int cuLaunchKernelEx(const Config* config, void* function, void** arguments, void**) {
  char text[256];
  int n = std::snprintf(text, sizeof text, " %s grid %u block %u shared %u attributes %u:", static_cast<char*>(function),
                        config->grid[0], config->block[0], config->shared, config->count);
  for (unsigned k = 0; k < 3; ++k) {
    n += std::snprintf(text + n, sizeof text - n, " %llx", static_cast<unsigned long long>(*static_cast<uint64_t*>(arguments[k])));
  }
  return Note("cuLaunchKernelEx", text);
}
}
