// The fuzzer's entry: the first byte says whose words are fuzzed.
#include "input.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  switch (input.below(3)) {
    case 0:
      fuzz::mailbox(input);
      break;
    case 1:
      fuzz::outbox(input);
      break;
    default:
      fuzz::block(input);
  }
  return 0;
}
