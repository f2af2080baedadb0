# Only the kernel instances may hold instructions beyond the baseline: the rest runs before the CPU was looked at.
. "$(dirname "$0")/common.sh"
need objdump
case $PROCESSOR in
  x86_64 | AMD64) ;;
  *) echo "SKIPPED: the processor is $PROCESSOR; this test knows the instructions of x86-64"; exit 0 ;;
esac
fresh instructions
checked=0 kernels=0
for object in $(find "$BUILD/src/CMakeFiles" -name '*.o'); do
  name=${object#"$BUILD/src/CMakeFiles/"}
  case $name in
    qkv_kernel_avx*) kernels=$((kernels + 1)); continue ;;
  esac
  if objdump -d --no-show-raw-insn "$object" | grep -E '%[yz]mm|%k[0-7]|^ +[0-9a-f]+:[[:space:]]+v[a-z0-9]+ ' >found; then
    fail "$name, which is no kernel instance, has $(wc -l <found) instructions of AVX, the first: $(head -1 found)"
  fi
  checked=$((checked + 1))
done
[ "$kernels" -ge 2 ] || fail "only $kernels kernel instances for AVX2 and AVX-512 found"
[ "$checked" -ge 10 ] || fail "only $checked other objects found"
echo "$checked objects without AVX, $kernels kernel instances"
