// SPDX-License-Identifier: Apache-2.0
#include "cuda_driver.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <utility>

namespace tapchannel::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

// CU_GET_PROC_ADDRESS_LEGACY_STREAM: stream 0 is the legacy default stream, as in a build without
// per-thread default streams.
constexpr std::uint64_t kLegacyStream = 1;

using GetProcAddress = CUresult (*)(const char* symbol, void** function, int version,
                                    std::uint64_t flags);
using GetProcAddressV2 = CUresult (*)(const char* symbol, void** function, int version,
                                      std::uint64_t flags, int* status);

struct Loaded {
  Driver functions;
  std::string refusal;  // empty: the driver is usable
};

class Library {
 public:
  explicit Library(void* handle)
      : v2_(reinterpret_cast<GetProcAddressV2>(dlsym(handle, "cuGetProcAddress_v2"))),
        v1_(reinterpret_cast<GetProcAddress>(dlsym(handle, "cuGetProcAddress"))) {}

  bool can_look_up() const { return v2_ != nullptr || v1_ != nullptr; }

  void* look_up(const char* symbol, int version) const {
    void* function = nullptr;
    CUresult answer = v2_ != nullptr ? v2_(symbol, &function, version, kLegacyStream, nullptr)
                                     : v1_(symbol, &function, version, kLegacyStream);
    return answer == CUDA_SUCCESS ? function : nullptr;
  }

 private:
  GetProcAddressV2 v2_;  // drivers of CUDA 12 and later
  GetProcAddress v1_;    // drivers of CUDA 11.3 to 11.8
};

std::string version_text(int version) {
  return version == 0 ? "of unknown version"
                      : "for CUDA " + std::to_string(version / 1000) + "." +
                            std::to_string(version % 1000 / 10);
}

std::string code_text(const Driver& cu, CUresult code) {
  const char* name = nullptr;
  const char* meaning = nullptr;
  if (cu.cuGetErrorName(code, &name) != CUDA_SUCCESS ||
      cu.cuGetErrorString(code, &meaning) != CUDA_SUCCESS)
    return "error " + std::to_string(code);
  return std::string(name) + " (" + meaning + ")";
}

std::string visible_devices_text() {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): read once, and nothing here sets it
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return visible == nullptr ? "CUDA_VISIBLE_DEVICES is not set"
                            : "CUDA_VISIBLE_DEVICES is '" + std::string(visible) + "'";
}

std::string init_refusal(const Driver& cu, CUresult code) {
  std::string text = "the CUDA driver " + version_text(cu.version) +
                     " is installed but cuInit answers " + code_text(cu, code);
  switch (code) {
    case CUDA_ERROR_NO_DEVICE:
      return text + ": no GPU is visible to this process; " + visible_devices_text() +
             "; check it, and that the container was given a GPU";
    case CUDA_ERROR_STUB_LIBRARY:
      return text +
             ": the CUDA toolkit's stub was found before the real library; take the `stubs` folder "
             "off LD_LIBRARY_PATH";
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
      return text +
             ": the library and the kernel module differ in version; restart the machine, or "
             "repair the driver's installation";
    default:
      return text + "; run nvidia-smi to see whether the driver works at all";
  }
}

// Fills `cu`; returns the names that this driver does not have, each with the version asked for.
std::string look_up_all(const Library& library, Driver& cu) {
  std::string missing;
  const auto note_missing = [&missing](const char* name, int version) {
    missing +=
        (missing.empty() ? "" : ", ") + std::string(name) + " (" + version_text(version) + ")";
  };
#define TAPCHANNEL_CUDA_LOOK_UP(name, version, ...)                               \
  cu.name = reinterpret_cast<decltype(cu.name)>(library.look_up(#name, version)); \
  if (cu.name == nullptr) note_missing(#name, version);
  TAPCHANNEL_CUDA_FUNCTIONS(TAPCHANNEL_CUDA_LOOK_UP)
#undef TAPCHANNEL_CUDA_LOOK_UP
  return missing;
}

std::string load_into(Driver& cu) {
  void* handle = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();  // NOLINT(concurrency-mt-unsafe): glibc's is per thread
    return std::string("the CUDA driver library could not be loaded (") +
           (reason == nullptr ? kLibrary : reason) +
           "): most likely no NVIDIA driver is installed, or the container was started without a "
           "GPU; shm needs neither";
  }
  const Library library(handle);
  if (!library.can_look_up())
    return std::string(kLibrary) +
           " has no cuGetProcAddress: it is older than CUDA 11.3, or not NVIDIA's; install a "
           "driver for CUDA 12 or later";
  const std::string missing = look_up_all(library, cu);
  if (cu.cuDriverGetVersion != nullptr && cu.cuDriverGetVersion(&cu.version) != CUDA_SUCCESS)
    cu.version = 0;
  if (!missing.empty())
    return "the CUDA driver " + version_text(cu.version) + " lacks " + missing +
           "; install a driver for CUDA 12 or later";
  const CUresult initialised = cu.cuInit(0);
  return initialised == CUDA_SUCCESS ? std::string() : init_refusal(cu, initialised);
}

// Never destroyed: deleters of tensors may run after static destructors.
const Loaded& loaded() {
  static const Loaded* const once = [] {
    auto* made = new Loaded;
    made->refusal = load_into(made->functions);
    return made;
  }();
  return *once;
}

std::string asked_of_driver(CUresult code, CUresult (*question)(CUresult, const char**),
                            const char* otherwise) {
  const char* answer = nullptr;
  if (question == nullptr || question(code, &answer) != CUDA_SUCCESS || answer == nullptr)
    return otherwise;
  return answer;
}

}  // namespace

const Driver* driver() { return loaded().refusal.empty() ? &loaded().functions : nullptr; }

const std::string& driver_refusal() { return loaded().refusal; }

const Driver& require_driver() {
  if (const Driver* usable = driver()) return *usable;
  throw CudaError(kLibrary, CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED",
                  driver_refusal());
}

CudaError::CudaError(std::string refused_call, CUresult answer)
    : CudaError(
          std::move(refused_call), answer,
          asked_of_driver(answer, loaded().functions.cuGetErrorName, "unnamed error"),
          asked_of_driver(answer, loaded().functions.cuGetErrorString, "unknown to this driver")) {}

CudaError::CudaError(std::string refused_call, CUresult answer, std::string answer_name,
                     std::string answer_meaning)
    : call(std::move(refused_call)),
      code(answer),
      name(std::move(answer_name)),
      meaning(std::move(answer_meaning)),
      text_(call + ": " + name + " (" + std::to_string(code) + "): " + meaning) {}

}  // namespace tapchannel::cuda
