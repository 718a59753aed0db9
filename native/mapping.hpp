// A memfd and its mapping: the host memory that two processes share.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace tapchannel {

[[noreturn]] inline void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

class Mapping {
 public:
  Mapping() = default;
  // Makes a memfd that can neither shrink nor grow: a peer that truncated it could kill this
  // process with SIGBUS.
  static Mapping create(const std::string& name, size_t bytes) {
    int fd = memfd_create(name.substr(0, 200).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) throw_errno("memfd_create");
    Mapping made(fd, nullptr, bytes);
    if (ftruncate(fd, static_cast<off_t>(bytes)) != 0)
      throw_errno("ftruncate of a memfd to " + std::to_string(bytes) + " bytes");
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
      throw_errno("sealing a memfd");
    made.map();
    return made;
  }
  // Maps a peer's memfd after checking its size and seals. Takes the descriptor over.
  static Mapping adopt(int fd, size_t bytes) {
    Mapping made(fd, nullptr, bytes);
    struct stat facts{};
    if (fstat(fd, &facts) != 0) throw_errno("fstat of a received descriptor");
    if (static_cast<uint64_t>(facts.st_size) != bytes)
      throw std::invalid_argument("received memory has " + std::to_string(facts.st_size) +
                                  " bytes, expected " + std::to_string(bytes));
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW))
      throw std::invalid_argument("received memory is not sealed against shrinking and growing");
    made.map();
    return made;
  }
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping() {
    if (base_ != nullptr) munmap(base_, bytes_);
    if (fd_ >= 0) close(fd_);
  }
  // Commits every page now, so that no push pays for a page fault and a full machine refuses here
  // and not in mid-pass.
  void populate() {
    madvise(base_, bytes_, MADV_HUGEPAGE);  // a wish: shared memory may not get huge pages
#ifndef MADV_POPULATE_WRITE
    constexpr int MADV_POPULATE_WRITE = 23;
#endif
    if (madvise(base_, bytes_, MADV_POPULATE_WRITE) != 0 && errno != EINVAL)
      throw_errno("committing " + std::to_string(bytes_) + " bytes of host memory");
  }
  int fd() const { return fd_; }
  size_t bytes() const { return bytes_; }
  uint8_t* base() const { return static_cast<uint8_t*>(base_); }

 private:
  Mapping(int fd, void* base, size_t bytes) : fd_(fd), base_(base), bytes_(bytes) {}
  void map() {
    void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (at == MAP_FAILED) throw_errno("mapping " + std::to_string(bytes_) + " bytes");
    base_ = at;
  }
  int fd_ = -1;
  void* base_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace tapchannel
