// Writes JSON text.
#pragma once

#include <cstdio>
#include <sstream>
#include <string>

#include "product.h"

namespace KERNEL_NAMESPACE {

inline const char* json_boolean(bool value) { return value ? "true" : "false"; }

inline std::string json_string(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", c);
      result += escape;
    } else {
      result += c;
    }
  }
  return result + "\"";
}

// Returns a JSON list; `write(text, item)` writes each item to the stream.
template <class List, class Write>
std::string json_list(const List& list, Write&& write) {
  std::ostringstream text;
  const char* separator = "";
  for (const auto& one : list) {
    text << separator;
    write(text, one);
    separator = ", ";
  }
  return "[" + text.str() + "]";
}

}  // namespace KERNEL_NAMESPACE
