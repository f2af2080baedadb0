! Attention from Fortran: the structs of qkv.h as bind(C) types, its functions as interfaces.
module qkv_from_fortran
  use, intrinsic :: iso_c_binding
  implicit none

  integer(c_int32_t), parameter :: QKV_OK = 0, QKV_BAD_EXTENT = 103, QKV_F32 = 1

  type, bind(C) :: qkv_tensor
    type(c_ptr) :: data = c_null_ptr
    integer(c_int64_t) :: stride(4) = 0
    integer(c_int32_t) :: dtype = 0
    integer(c_int32_t) :: reserved = 0
  end type

  type, bind(C) :: qkv_problem
    integer(c_int32_t) :: size = 0
    integer(c_int32_t) :: algorithm = 0
    integer(c_int32_t) :: align = 0
    integer(c_int32_t) :: arithmetic = 0
    integer(c_int64_t) :: batch = 0
    integer(c_int64_t) :: num_heads = 0
    integer(c_int64_t) :: num_kv_heads = 0
    integer(c_int64_t) :: seqlen_q = 0
    integer(c_int64_t) :: seqlen_kv = 0
    integer(c_int64_t) :: head_dim = 0
    integer(c_int64_t) :: head_dim_v = 0
    type(qkv_tensor) :: q, k, v, out, lse
    real(c_double) :: softmax_scale = 0
    real(c_double) :: softcap = 0
    type(c_ptr) :: mask = c_null_ptr
    integer(c_int64_t) :: mask_count = 0
    type(qkv_tensor) :: bias, alibi_slopes, sinks
    type(c_ptr) :: q_length = c_null_ptr
    type(c_ptr) :: kv_begin = c_null_ptr
    type(c_ptr) :: kv_length = c_null_ptr
    type(c_ptr) :: q_position = c_null_ptr
    type(c_ptr) :: kv_position = c_null_ptr
    type(c_ptr) :: cu_seqlens_q = c_null_ptr
    type(c_ptr) :: cu_seqlens_kv = c_null_ptr
    real(c_double) :: dropout = 0
    integer(c_int64_t) :: seed = 0
    integer(c_int64_t) :: offset = 0
    integer(c_int64_t) :: batch_origin = 0
    integer(c_int64_t) :: head_origin = 0
    integer(c_int64_t) :: heads_total = 0
  end type

  interface
    function qkv_version() bind(C) result(version)
      import :: c_int32_t
      integer(c_int32_t) :: version
    end function
    function qkv_check(problem, text, bytes) bind(C) result(status)
      import :: qkv_problem, c_int32_t, c_char, c_size_t
      type(qkv_problem), intent(in) :: problem
      character(kind=c_char), intent(out) :: text(*)
      integer(c_size_t), value :: bytes
      integer(c_int32_t) :: status
    end function
    function qkv_forward(context, problem, scratch, bytes) bind(C) result(status)
      import :: qkv_problem, c_int32_t, c_ptr, c_size_t
      type(c_ptr), value :: context, scratch
      type(qkv_problem), intent(in) :: problem
      integer(c_size_t), value :: bytes
      integer(c_int32_t) :: status
    end function
  end interface

contains
  ! A Fortran array a(dim, row, head) is row-major (head, row, dim) to C.
  function tensor(address, dim, rows, heads) result(t)
    type(c_ptr), intent(in) :: address
    integer(c_int64_t), intent(in) :: dim, rows, heads
    type(qkv_tensor) :: t
    t%data = address
    t%dtype = QKV_F32
    t%stride = [heads * rows * dim, rows * dim, dim, 1_c_int64_t]
  end function
end module

program consumer
  use qkv_from_fortran
  implicit none
  integer(c_int64_t), parameter :: heads = 2, rows = 3, keys = 4, dim = 5
  real(c_float), target :: q(dim, rows, heads), k(dim, keys, heads), v(dim, keys, heads), out(dim, rows, heads)
  type(qkv_problem) :: p
  character(kind=c_char) :: text(200)
  character(len=20) :: expected
  integer(c_int32_t) :: status
  integer :: c_size, h

  call get_command_argument(1, expected)
  read (expected, *) c_size
  p%size = int(c_sizeof(p), c_int32_t)
  if (p%size /= c_size) then
    print *, 'qkv_problem has', p%size, 'bytes here and', c_size, 'in C'
    error stop 1
  end if
  if (qkv_version() < 1) error stop 2

  q = 0
  k = 1
  do h = 1, int(heads)
    v(:, :, h) = spread([1.0, 2.0, 3.0, 6.0], 1, int(dim)) * real(h)
  end do
  p%batch = 1
  p%num_heads = heads
  p%seqlen_q = rows
  p%seqlen_kv = keys
  p%head_dim = dim
  p%q = tensor(c_loc(q), dim, rows, heads)
  p%k = tensor(c_loc(k), dim, keys, heads)
  p%v = tensor(c_loc(v), dim, keys, heads)
  p%out = tensor(c_loc(out), dim, rows, heads)
  status = qkv_check(p, text, int(size(text), c_size_t))
  if (status /= QKV_OK) then
    print *, text
    error stop 3
  end if
  if (qkv_forward(c_null_ptr, p, c_null_ptr, 0_c_size_t) /= QKV_OK) error stop 4
  ! Equal scores: the mean of the keys' values.
  if (any(out(:, :, 1) /= 3.0) .or. any(out(:, :, 2) /= 6.0)) then
    print *, out
    error stop 5
  end if
  p%num_kv_heads = 3
  if (qkv_check(p, text, int(size(text), c_size_t)) /= QKV_BAD_EXTENT) error stop 6
end program
