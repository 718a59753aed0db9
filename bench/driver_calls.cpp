// What the driver's own calls of a push cost the host: the bound of tapchannel's push.
//
//     g++ -O2 -std=c++17 -o driver_calls bench/driver_calls.cpp -ldl && ./driver_calls
//
// 60 rounds of 64 messages, from cuda:1 where there is one to cuda:0, each timed; then a wait until
// all is done. Prints the tenth, the median and the ninetieth of a hundred, in microseconds.
#include <dlfcn.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

namespace {
using Handle = void*;
using Address = unsigned long long;
void* library = nullptr;

template <class Call>
Call* call(const char* name) {
  auto* found = reinterpret_cast<Call*>(dlsym(library, name));
  if (found == nullptr) std::exit(std::fprintf(stderr, "the driver has no %s\n", name));
  return found;
}

double now_us() {
  timespec at{};
  clock_gettime(CLOCK_MONOTONIC, &at);
  return static_cast<double>(at.tv_sec) * 1e6 + static_cast<double>(at.tv_nsec) / 1e3;
}
}  // namespace

int main() {
  library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) return std::fprintf(stderr, "no CUDA driver: %s\n", dlerror());
  call<int(unsigned)>("cuInit")(0);
  int count = 0;
  call<int(int*)>("cuDeviceGetCount")(&count);
  auto retain = call<int(Handle*, int)>("cuDevicePrimaryCtxRetain");
  auto make_current = call<int(Handle)>("cuCtxSetCurrent");
  auto allocate = call<int(Address*, size_t)>("cuMemAlloc_v2");
  Handle there = nullptr, here = nullptr;
  retain(&there, 0);
  retain(&here, count > 1 ? 1 : 0);
  Address target = 0, source = 0, word = 0;
  make_current(there);
  allocate(&target, size_t{64} << 20);
  make_current(here);
  if (count > 1) call<int(Handle, unsigned)>("cuCtxEnablePeerAccess")(there, 0);
  allocate(&source, size_t{64} << 20);
  Handle page = nullptr;
  call<int(Handle*, size_t, unsigned)>("cuMemHostAlloc")(&page, 4096, 3);
  call<int(Address*, Handle, unsigned)>("cuMemHostGetDevicePointer_v2")(&word, page, 0);

  auto make_stream = call<int(Handle*, unsigned)>("cuStreamCreate");
  auto make_event = call<int(Handle*, unsigned)>("cuEventCreate");
  Handle user = nullptr, copying[2] = {};
  for (Handle* stream : {&user, &copying[0], &copying[1]}) make_stream(stream, 1);
  std::vector<Handle> events(64);
  for (Handle& event : events) make_event(&event, 2);
  auto record = call<int(Handle, Handle)>("cuEventRecord");
  auto await = call<int(Handle, Handle, unsigned)>("cuStreamWaitEvent");
  auto copy = call<int(Address, Address, size_t, Handle)>("cuMemcpyDtoDAsync_v2");
  auto write = call<int(Handle, Address, uint64_t, unsigned)>("cuStreamWriteValue64_v2");
  auto settle = call<int()>("cuCtxSynchronize");

  uint64_t key = 0;
  auto measure = [&](const char* name, const std::function<void(size_t)>& one) {
    std::vector<double> took;
    for (int round = 0; round < 60; ++round) {
      for (size_t i = 0; i < events.size(); ++i) {
        double began = now_us();
        one(i);
        took.push_back(now_us() - began);
      }
      settle();
    }
    std::sort(took.begin(), took.end());
    std::printf("%-40s %6.2f %6.2f %6.2f us\n", name, took[took.size() / 10], took[took.size() / 2],
                took[took.size() * 9 / 10]);
  };
  auto order = [&](size_t i) {
    record(events[i], user);
    await(copying[i % 2], events[i], 0);
  };
  auto put = [&](size_t i, size_t bytes) {
    copy(target + i * 4096, source, bytes, copying[i % 2]);
  };
  auto stamp = [&](size_t i) { write(copying[i % 2], word, ++key, 0); };
  measure("event: record, await", order);
  measure("stamp", stamp);
  for (size_t bytes : {size_t{4096}, size_t{1} << 20}) {
    std::printf("%zu KiB:\n", bytes >> 10);
    measure("copy", [&](size_t i) { put(i, bytes); });
    measure("event, copy, stamp: a push's calls", [&](size_t i) {
      order(i);
      put(i, bytes);
      stamp(i);
    });
  }
  return 0;
}
