//! A kernel's CUDA C++, the same text for the same kernel.
//!
//! cubecl lists variables and shared memories in the order of hash tables, which is another one every time: a kernel would
//! have another text, another layout of its shared memory and another place in the cache of compiled kernels in every
//! process. Here they come in the order of their names and numbers.

use cubecl::CubeDim;
use cubecl_cpp::cuda::{CudaDialect, mma::CudaWmmaCompiler};
use cubecl_cpp::shared::{CompilationOptions, ComputeKernel, CppCompiler, Dialect, Instruction, SharedMemory};
use cubecl_runtime::compiler::CubeTask;
use cubecl_runtime::server::ExecutionMode;

use super::error::Error;

type Language = CudaDialect<CudaWmmaCompiler>;

/// cubecl's compiler from its own representation to CUDA C++.
pub type Compiler = CppCompiler<Language>;

/// A kernel written down.
pub struct Source {
    /// CUDA C++.
    pub text: String,
    /// The function's name in it.
    pub entry: String,
    /// Bytes of shared memory of a cube.
    pub shared_memory: usize,
    /// Units of a cube.
    pub dim: CubeDim,
}

/// Writes a kernel down.
pub fn source(
    name: &str,
    kernel: &dyn CubeTask<Compiler>,
    options: &CompilationOptions,
    mode: ExecutionMode,
) -> Result<Source, Error> {
    let fault = |log: String| Error::Compile { kernel: name.to_owned(), log: log.into() };
    let compiled = kernel
        .compile(&mut Compiler::default(), options, mode, kernel.address_type())
        .map_err(|e| fault(e.to_string()))?;
    let mut repr = compiled.repr.ok_or_else(|| fault("cubecl compiled it to text only".to_owned()))?;
    settle(&mut repr);
    Ok(Source {
        text: with_types_sorted(&repr.to_string()),
        entry: compiled.entrypoint_name,
        shared_memory: repr.shared_memory_size(),
        dim: compiled.cube_dim,
    })
}

/// Puts what has no order of its own in one.
fn settle(kernel: &mut ComputeKernel<Language>) {
    let declares = |i: &Instruction<Language>| matches!(i, Instruction::DeclareVariable { .. });
    for run in kernel.body.instructions.chunk_by_mut(|a, b| declares(a) && declares(b)) {
        run.sort_by_cached_key(ToString::to_string);
    }
    place(&mut kernel.body.shared_memories);
}

/// The text with the definitions of its vector types, which come one after the other and do not name each other, sorted.
fn with_types_sorted(text: &str) -> String {
    const BEGIN: &str = "struct __align__(";
    const END: &str = "};\n";
    let Some(begin) = text.find(BEGIN) else { return text.to_owned() };
    let (before, mut after) = text.split_at(begin);
    let mut types = Vec::new();
    while after.starts_with(BEGIN) {
        let Some(end) = after.find(END) else { break };
        let (definition, rest) = after.split_at(end + END.len());
        types.push(definition);
        after = rest;
    }
    types.sort_unstable();
    [before, &types.concat(), after].concat()
}

/// Lays shared memories out one behind the other by number. Where two of them have one place, because they are never in use
/// together, places stay as they are.
fn place<D: Dialect>(memories: &mut [SharedMemory<D>]) {
    memories.sort_by_key(SharedMemory::offset);
    let apart = memories.windows(2).all(|pair| pair[0].offset() + pair[0].size() <= pair[1].offset());
    memories.sort_by_key(number);
    if apart {
        let mut end = 0usize;
        for memory in memories {
            let (at, size) = (end.next_multiple_of(memory.align()), memory.size());
            let (SharedMemory::Array { offset, .. } | SharedMemory::Value { offset, .. }) = memory;
            *offset = at;
            end = at + size;
        }
    }
}

/// The number in a shared memory's name.
fn number<D: Dialect>(memory: &SharedMemory<D>) -> u32 {
    let (SharedMemory::Array { index, .. } | SharedMemory::Value { index, .. }) = memory;
    *index
}

#[cfg(test)]
mod tests {
    use cubecl_cpp::shared::{Elem, Item};

    use super::*;

    /// Number, floats, alignment, offset.
    fn array(index: u32, length: usize, align: usize, offset: usize) -> SharedMemory<Language> {
        SharedMemory::Array { index, item: Item::scalar(Elem::F32, true), length, align, offset }
    }

    fn placed(mut memories: Vec<SharedMemory<Language>>) -> Vec<(u32, usize)> {
        place(&mut memories);
        memories.iter().map(|memory| (number(memory), memory.offset())).collect()
    }

    #[test]
    fn shared_memories_lie_in_the_order_of_their_numbers_and_aligned() {
        let wanted = vec![(3, 0), (7, 16), (9, 32)];
        assert_eq!(placed(vec![array(9, 8, 16, 0), array(3, 3, 4, 48), array(7, 4, 16, 32)]), wanted);
        assert_eq!(placed(vec![array(7, 4, 16, 0), array(9, 8, 16, 16), array(3, 3, 4, 48)]), wanted);
    }

    #[test]
    fn shared_memories_that_share_a_place_keep_it() {
        assert_eq!(placed(vec![array(2, 4, 4, 8), array(1, 4, 4, 0)]), [(1, 0), (2, 8)]);
    }

    #[test]
    fn types_are_sorted_and_the_rest_stays() {
        let [f, h] =
            ["struct __align__(8) float_2 {\nfloat i_0;\n};\n", "struct __align__(4) half_2 {\nhalf i_0;\n};\n"];
        let text = |types: &str| format!("typedef int int32;\n{types}struct info_st {{\n}};\nvoid f() {{}}\n");
        assert_eq!(with_types_sorted(&text(&[f, h].concat())), text(&[h, f].concat()));
        assert_eq!(with_types_sorted(&text(&[h, f].concat())), text(&[h, f].concat()));
        assert_eq!(with_types_sorted(&text("")), text(""));
        assert_eq!(with_types_sorted("struct __align__(8) float_2 {"), "struct __align__(8) float_2 {");
    }
}
