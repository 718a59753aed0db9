// Where there is no clang, and so no libFuzzer: the corpus's inputs, then changes of them at
// random.
//
//   target [-runs=N] [-seed=N] [FILE or FOLDER]...
#include <sanitizer/common_interface_defs.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "input.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;
constexpr size_t kLongest = 512;

Bytes read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

const Bytes* now = nullptr;

void save() {
  if (now == nullptr) return;
  std::ofstream file("crash-input", std::ios::binary);
  file.write(reinterpret_cast<const char*>(now->data()), static_cast<std::streamsize>(now->size()));
  std::fprintf(stderr, "fuzz: the input is in crash-input\n");
}

void change(Bytes& bytes, const std::vector<Bytes>& corpus, std::mt19937_64& random) {
  for (uint64_t changes = 1 + random() % 8; changes > 0; --changes) {
    size_t at = bytes.empty() ? 0 : random() % bytes.size();
    switch (random() % 5) {
      case 0:
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                     static_cast<uint8_t>(random()));
        break;
      case 1:
        if (!bytes.empty()) bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(at));
        break;
      case 2: {
        const Bytes& other = corpus[random() % corpus.size()];
        bytes.insert(bytes.end(), other.begin() + (other.empty() ? 0 : 1), other.end());
        break;
      }
      default:
        if (!bytes.empty()) bytes[at] = static_cast<uint8_t>(random());
    }
  }
  if (bytes.size() > kLongest) bytes.resize(kLongest);
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t runs = 0, seed = 1;
  std::vector<Bytes> corpus;
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    if (word.rfind("-runs=", 0) == 0) {
      runs = std::stoull(word.substr(6));
    } else if (word.rfind("-seed=", 0) == 0) {
      seed = std::stoull(word.substr(6));
    } else if (std::filesystem::is_directory(word)) {
      for (const auto& entry : std::filesystem::directory_iterator(word))
        corpus.push_back(read(entry.path()));
    } else {
      corpus.push_back(read(word));
    }
  }
  for (const Bytes& bytes : corpus) LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  if (corpus.empty()) corpus.emplace_back(1);
  __sanitizer_set_death_callback(&save);
  std::signal(SIGABRT, [](int) {
    save();
    std::_Exit(1);
  });
  std::mt19937_64 random(seed);
  for (uint64_t run = 0; run < runs; ++run) {
    Bytes bytes = corpus[random() % corpus.size()];
    change(bytes, corpus, random);
    now = &bytes;
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("fuzz: %llu inputs\n", static_cast<unsigned long long>(runs + corpus.size()));
  return 0;
}
