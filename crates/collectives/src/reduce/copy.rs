//! Copies.

/// Copies `bytes` from `src` to `dst`.
///
/// # Safety
/// Both are valid for `bytes` bytes and do not overlap.
#[inline]
pub unsafe fn copy(dst: *mut u8, src: *const u8, bytes: usize) {
    // SAFETY: the caller's contract is the same.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes) }
}

/// Copies `bytes` from `src` to `dst` past the caches: for destinations too large to be
/// found there when they are read next.
///
/// Ends with a store fence, so that a flag set afterwards is seen after the data.
///
/// # Safety
/// Both are valid for `bytes` bytes and do not overlap.
pub unsafe fn copy_nontemporal(dst: *mut u8, src: *const u8, bytes: usize) {
    // SAFETY: the caller's contract is the same.
    unsafe { copy(dst, src, bytes) }
}
