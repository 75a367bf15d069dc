// The CUDA launcher with its chains callable from C: what XLA would hand to the handler's stages.
#include "../../custom_calls/launch_cuda.cc"

extern "C" int host_chain(const char* digests, const int64_t* wiring, int64_t count, int64_t scratch_bytes,
                          void** operands, int64_t reads, void** results, int64_t writes, char* text, int64_t size) {
  auto made = jcuts::InstantiateChain(digests, {wiring, static_cast<size_t>(count)}, scratch_bytes);
  if (made.has_error()) return jcuts::Report(made.error().message(), text, size);
  ffi::Error error = jcuts::InitializeChain(made->get(), 0);
  if (error.failure()) return jcuts::Report(error.message(), text, size);
  std::vector<XLA_FFI_Buffer> buffers(reads + writes);
  std::vector<void*> places;
  for (int64_t k = 0; k < reads + writes; ++k) {
    buffers[k] = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_U8, k < reads ? operands[k] : results[k - reads],
                  0, nullptr};
    places.push_back(&buffers[k]);
  }
  std::vector<XLA_FFI_ArgType> arg_types(reads, XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(writes, XLA_FFI_RetType_BUFFER);
  XLA_FFI_Args args{XLA_FFI_Args_STRUCT_SIZE, nullptr, reads, arg_types.data(), places.data()};
  XLA_FFI_Rets rets{XLA_FFI_Rets_STRUCT_SIZE, nullptr, writes, ret_types.data(), places.data() + reads};
  error = jcuts::ExecuteChain(made->get(), nullptr, 0, ffi::RemainingArgs(&args, 0), ffi::RemainingRets(&rets, 0));
  return jcuts::Report(error.failure() ? error.message() : "", text, size);
}
