// A fuzzer's bytes, taken apart; past their end they are zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fuzz {

class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), left_(size) {}
  bool empty() const { return left_ == 0; }
  template <class T>
  T take() {
    T value{};
    size_t bytes = left_ < sizeof(T) ? left_ : sizeof(T);
    std::memcpy(&value, data_, bytes);
    data_ += bytes;
    left_ -= bytes;
    return value;
  }
  size_t below(size_t limit) { return take<uint8_t>() % limit; }

 private:
  const uint8_t* data_;
  size_t left_;
};

// What must hold whatever a peer has written.
inline void must(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: does not hold: %s\n", what);
  std::abort();
}

void mailbox(Input& input);
void outbox(Input& input);
void block(Input& input);

}  // namespace fuzz
