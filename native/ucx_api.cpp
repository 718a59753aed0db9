#include "ucx_api.hpp"

#include <dlfcn.h>

#include <atomic>
#include <mutex>

namespace tapchannel::ucx {

namespace {
// Never closed: UCX has patched libc by then.
void* open_library(const std::string& path, int binding) {
  void* handle = dlopen(path.c_str(), binding | RTLD_LOCAL);
  if (handle != nullptr) return handle;
  const char* reason = dlerror();  // NOLINT(concurrency-mt-unsafe): glibc's is per thread
  throw UcxError(path + " cannot be loaded: " + (reason == nullptr ? "no reason given" : reason));
}

void look_up_all(void* handle, Api& made) {
  std::string missing;
#define TAPCHANNEL_UCX_LOOK_UP(name)                                       \
  made.name = reinterpret_cast<decltype(made.name)>(dlsym(handle, #name)); \
  if (made.name == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(#name);
  TAPCHANNEL_UCX_FUNCTIONS(TAPCHANNEL_UCX_LOOK_UP)
#undef TAPCHANNEL_UCX_LOOK_UP
  made.ucs_status_string = reinterpret_cast<decltype(made.ucs_status_string)>(
      dlsym(handle, "ucs_status_string"));  // libucp depends on libucs: dlsym searches it too
  if (made.ucs_status_string == nullptr) missing += " ucs_status_string";
  if (!missing.empty())
    throw UcxError(made.path + " lacks " + missing + ": it is no UCX, or one before 1.13");
}

std::mutex load_mutex;
std::atomic<const Api*> loaded{nullptr};  // never freed: threads may use it until the process ends
}  // namespace

const Api& load(const std::vector<std::string>& preload, const std::string& path) {
  std::lock_guard lock(load_mutex);
  const Api* before = loaded.load(std::memory_order_acquire);
  if (before != nullptr) {
    if (before->path == path) return *before;
    throw UcxError("UCX was loaded from " + before->path + " already, not from " + path +
                   ": a process can have one only");
  }
  for (const std::string& library : preload) open_library(library, RTLD_LAZY);
  Api made;
  made.path = path;
  look_up_all(open_library(path, RTLD_NOW), made);
  made.ucp_get_version(&made.major, &made.minor, &made.release);
  if (made.major != 1 || made.minor < 13)
    throw UcxError(path + " is UCX " + std::to_string(made.major) + "." +
                   std::to_string(made.minor) + ": 1.13 or a later 1.x is needed");
  loaded.store(new Api(made), std::memory_order_release);
  return *loaded.load(std::memory_order_acquire);
}

const Api& api() {
  const Api* usable = loaded.load(std::memory_order_acquire);
  if (usable == nullptr) throw UcxError("UCX has not been loaded");
  return *usable;
}

std::string status_text(ucs_status_t status) {
  return std::string(api().ucs_status_string(status)) + " (" +
         std::to_string(static_cast<int>(status)) + ")";
}

UcxError::UcxError(const std::string& call, ucs_status_t status)
    : std::runtime_error(call + ": " + status_text(status)) {}

void check(ucs_status_t status, const char* call) {
  if (status != UCS_OK) throw UcxError(call, status);
}

}  // namespace tapchannel::ucx
