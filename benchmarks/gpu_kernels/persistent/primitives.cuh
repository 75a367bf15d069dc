// Instructions of the persistent kernel: barriers, counters, copies and matrix products, as inline PTX for sm_90.
typedef unsigned long long u64;
#define SHARED_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]

// -- threads ----------------------------------------------------------------------------------------------------------
// The first THREADS threads compute; one warp more brings the weights and takes part in no barrier of the others.
__device__ __forceinline__ void sync() {
  __syncwarp();
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}
__device__ __forceinline__ int thread() {
  int v;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
  return v;
}
__device__ __forceinline__ float shuffle(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
__device__ __forceinline__ u64 timer() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}
__device__ __forceinline__ u64 cycles() {
  u64 t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
  return t;
}
__device__ __forceinline__ void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// -- counters in global memory ----------------------------------------------------------------------------------------
__device__ __forceinline__ void arrive_release(unsigned* c) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(c) : "memory");
}
__device__ __forceinline__ unsigned look(const unsigned* c) {
  unsigned v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(c) : "memory");
  return v;
}
__device__ __forceinline__ unsigned add_acq_rel(unsigned* c) {
  unsigned v;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(c) : "memory");
  return v;
}
__device__ __forceinline__ void raise(unsigned* c, unsigned v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(c), "r"(v) : "memory");
}

// -- shared memory ----------------------------------------------------------------------------------------------------
__device__ __forceinline__ unsigned address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void barrier_init(u64* b, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(b)), "r"(count) : "memory");
}
__device__ __forceinline__ void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* b) {
  asm volatile("{\n.reg .b64 t;\nmbarrier.arrive.shared::cta.b64 t, [%0];\n}" ::"r"(address(b)) : "memory");
}
__device__ __forceinline__ bool barrier_try(u64* b, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(address(b)), "r"(parity)
      : "memory");
  return done != 0;
}
// The bulk copy engine brings `bytes` and then completes the phase of the barrier.
__device__ __forceinline__ void bulk_copy(void* to, const void* from, unsigned bytes, u64* b) {
  asm volatile("{\n.reg .b64 t;\nmbarrier.arrive.expect_tx.shared::cta.b64 t, [%0], %1;\n}" ::"r"(address(b)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   address(to)),
               "l"(from), "r"(bytes), "r"(address(b))
               : "memory");
}
// 16 bytes through the L2 cache, past the first level; zeros where `ok` is false.
__device__ __forceinline__ void copy16(void* to, const float* from, bool ok) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(to)), "l"(from), "r"(ok ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ int peek(const int* p) { return *(const volatile int*)p; }
__device__ __forceinline__ void poke(int* p, int v) { *(volatile int*)p = v; }

// -- global memory: activations come from the L2 cache, never from a stale first level --------------------------------
__device__ __forceinline__ float4 load4(const float* p) { return __ldcg((const float4*)p); }
__device__ __forceinline__ float2 load2(const float* p) { return __ldcg((const float2*)p); }
__device__ __forceinline__ float4 constant4(const float* p) { return __ldg((const float4*)p); }
__device__ __forceinline__ float constant(const float* p) { return __ldg(p); }

// -- matrix units -----------------------------------------------------------------------------------------------------
__device__ __forceinline__ void matrix4(unsigned (&r)[4], const float* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address(p))
               : "memory");
}
__device__ __forceinline__ unsigned tf32(unsigned v) {
  unsigned r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(__uint_as_float(v)));
  return r;
}
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], float b0, float b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
__device__ __forceinline__ void mark(int* p, int number) {
  int v;
  asm volatile("mov.u32 %0, %1;" : "=r"(v) : "r"(number));
  *p = v;
}
