//! Copies.

/// Copies `bytes` from `src` to `dst`.
///
/// # Safety
/// Both are valid for `bytes` bytes and do not overlap.
#[inline]
pub unsafe fn copy(dst: *mut u8, src: *const u8, bytes: usize) {
    // SAFETY: the contract is the same.
    unsafe { dst.copy_from_nonoverlapping(src, bytes) }
}

/// Copies `bytes` from `src` to `dst` past the caches, where the CPU has instructions for that
/// (x86-64). It saves reading the destination before it is overwritten, and leaves in the caches
/// what is there: good for destinations that would not fit.
///
/// Other threads see all of it before whatever this thread stores afterwards.
///
/// # Safety
/// Both are valid for `bytes` bytes and do not overlap.
pub unsafe fn copy_nontemporal(dst: *mut u8, src: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

        /// A cache line, which must be filled at once not to be read from memory.
        type Line = [__m128i; 4];
        let head = dst.align_offset(size_of::<Line>()).min(bytes);
        let body = (bytes - head) / size_of::<Line>() * size_of::<Line>();
        // SAFETY: head, body and what is left make up the bytes that the caller vouches for; the
        // destination of the body is aligned; SSE2 belongs to the baseline.
        unsafe {
            copy(dst, src, head);
            let (dst, src) = (dst.add(head), src.add(head));
            for line in (0..body).step_by(size_of::<Line>()) {
                let (to, from) = (
                    dst.add(line).cast::<__m128i>(),
                    src.add(line).cast::<__m128i>(),
                );
                let line: Line = std::array::from_fn(|i| _mm_loadu_si128(from.add(i)));
                for (i, quarter) in line.into_iter().enumerate() {
                    _mm_stream_si128(to.add(i), quarter);
                }
            }
            copy(dst.add(body), src.add(body), bytes - head - body);
            _mm_sfence();
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the contract is the same.
    unsafe {
        copy(dst, src, bytes)
    }
}
