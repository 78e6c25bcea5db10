//! cuBLASLt, loaded when the first product is asked for.
//!
//! The library is column-major: the row-major product `out = a b` is its `out^T = b^T a^T`, so b is its first factor and
//! every matrix is described by its columns first. Sums are f32 and accumulate over tiles of k in an order that depends
//! on the algorithm only; algorithms that split k and add up in place, with atomics, are refused.

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr;

use cudarc::cublaslt::{result as lt, sys};
use cudarc::driver::{CudaStream, result as cu};
use dormouse_reference::Precision;

use super::table::{self, Key, Words};
use super::{Added, Addresses, BRANCHES, Call, Choice, Source, Stored};
use crate::runtime::Error;

/// Memory that algorithms may use besides their matrices; NVIDIA's advice for Hopper.
pub const WORKSPACE: usize = 32 << 20;

/// Suggestions that the library is asked for.
const SUGGESTIONS: usize = 16;

/// Bytes of the widest access that an algorithm makes to memory. An address is a multiple of it or of a word only: finer
/// classes would make the bits of a product depend on where in memory it lies, and buy nothing.
const WIDEST: u64 = 16;

/// The library with its plans. Used on the device thread only.
pub struct Library {
    handle: sys::cublasLtHandle_t,
    /// One for each branch of a captured step: products of two may run at the same time.
    workspaces: [u64; BRANCHES],
    version: usize,
    sm: u32,
    table: HashMap<Key, Words>,
    plans: HashMap<(Call, [u32; 4]), Option<Plan>>,
    choices: Vec<Choice>,
    asked: Option<usize>,
}

// SAFETY: the handle and descriptors belong to no thread; the mutex around the library lets one use them at a time.
unsafe impl Send for Library {}

/// One planned product.
struct Plan {
    description: Description,
    first: Layout,
    second: Layout,
    out: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// The library's word for a failure.
fn failed(call: &'static str) -> impl Fn(lt::CublasError) -> Error {
    move |error| Error::Call { call, reason: format!("{:?}", error.0), last_kernel: "none".to_owned() }
}

/// The address and size of a value that the library copies.
fn bytes<T>(value: &T) -> (*const c_void, usize) {
    (ptr::from_ref(value).cast(), size_of::<T>())
}

struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    /// Matrices of f32, or of bf16 if `narrow`, with `rows` rows and `columns` columns in the library's sense.
    fn new(narrow: bool, rows: usize, columns: usize, batch: usize, stored: Stored) -> Result<Self, Error> {
        use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
        let dtype = if narrow { sys::cudaDataType::CUDA_R_16BF } else { sys::cudaDataType::CUDA_R_32F };
        let layout = lt::create_matrix_layout(dtype, rows as u64, columns as u64, stored.row as i64)
            .map(Self)
            .map_err(failed("cublasLtMatrixLayoutCreate"))?;
        if batch > 1 {
            layout.set(Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &(batch as i32))?;
            layout.set(Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &(stored.next as i64))?;
        }
        Ok(layout)
    }

    fn set<T>(&self, attribute: sys::cublasLtMatrixLayoutAttribute_t, value: &T) -> Result<(), Error> {
        let (at, size) = bytes(value);
        // SAFETY: the layout is alive and `value` has the attribute's type.
        unsafe { lt::set_matrix_layout_attribute(self.0, attribute, at, size) }
            .map_err(failed("cublasLtMatrixLayoutSetAttribute"))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: created in `new` and destroyed here only. A failure leaks a few bytes.
        let _ = unsafe { lt::destroy_matrix_layout(self.0) };
    }
}

struct Description(sys::cublasLtMatmulDesc_t);

impl Description {
    fn new(call: &Call, added: u64) -> Result<Self, Error> {
        use sys::cublasComputeType_t as Compute;
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let compute = match call.precision {
            // Never TF32: that is what the faster types are for.
            Precision::Full => Compute::CUBLAS_COMPUTE_32F,
            Precision::Tf32 => Compute::CUBLAS_COMPUTE_32F_FAST_TF32,
            // Factors in bf16 have nothing to round.
            Precision::Bf16 if call.narrow => Compute::CUBLAS_COMPUTE_32F,
            Precision::Bf16 => Compute::CUBLAS_COMPUTE_32F_FAST_16BF,
        };
        let description = lt::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F)
            .map(Self)
            .map_err(failed("cublasLtMatmulDescCreate"))?;
        let operation = i32::from;
        description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(call.b.transposed))?;
        description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(call.a.transposed))?;
        if call.added == Added::Row {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            description.set_row(added)?;
        }
        Ok(description)
    }

    /// Says where the row lies that is added to every row.
    fn set_row(&self, at: u64) -> Result<(), Error> {
        self.set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &at)
    }

    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), Error> {
        let (at, size) = bytes(value);
        // SAFETY: the description is alive and `value` has the attribute's type.
        unsafe { lt::set_matmul_desc_attribute(self.0, attribute, at, size) }
            .map_err(failed("cublasLtMatmulDescSetAttribute"))
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: created in `new` and destroyed here only. A failure leaks a few bytes.
        let _ = unsafe { lt::destroy_matmul_desc(self.0) };
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new(alignments: [u32; 4]) -> Result<Self, Error> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = lt::create_matmul_pref().map(Self).map_err(failed("cublasLtMatmulPreferenceCreate"))?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(WORKSPACE as u64))?;
        // No split of k at all, or one whose parts are added up from the workspace: never in place.
        let scheme = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &scheme)?;
        let [a, b, added, out] = alignments;
        for (attribute, alignment) in [
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, added),
            // The library has no word for the alignment of a bias; it is written with the result.
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out.min(added)),
        ] {
            preference.set(attribute, &alignment)?;
        }
        Ok(preference)
    }

    fn set<T>(&self, attribute: sys::cublasLtMatmulPreferenceAttributes_t, value: &T) -> Result<(), Error> {
        let (at, size) = bytes(value);
        // SAFETY: the preference is alive and `value` has the attribute's type.
        unsafe { lt::set_matmul_pref_attribute(self.0, attribute, at, size) }
            .map_err(failed("cublasLtMatmulPreferenceSetAttribute"))
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created in `new` and destroyed here only. A failure leaks a few bytes.
        let _ = unsafe { lt::destroy_matmul_pref(self.0) };
    }
}

/// A number of an algorithm's configuration, unless the library does not know it.
fn configured(
    algorithm: &sys::cublasLtMatmulAlgo_t,
    attribute: sys::cublasLtMatmulAlgoConfigAttributes_t,
) -> Option<u32> {
    use sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
    let short = [Attribute::CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, Attribute::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID];
    let size = if short.contains(&attribute) { 2 } else { 4 };
    let (mut value, mut written) = (0u32, 0);
    // SAFETY: writes at most `size` bytes, which `value` has; a short value is its low half.
    let status = unsafe {
        sys::cublasLtMatmulAlgoConfigGetAttribute(
            algorithm,
            attribute,
            ptr::from_mut(&mut value).cast(),
            size,
            &mut written,
        )
    };
    status.result().is_ok().then_some(value)
}

/// Whether an algorithm can add a matrix that is not its result.
fn adds_another(algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
    let attribute = sys::cublasLtMatmulAlgoCapAttributes_t::CUBLASLT_ALGO_CAP_OUT_OF_PLACE_RESULT_SUPPORT;
    let (mut value, mut written) = (0i32, 0);
    // SAFETY: writes four bytes.
    let status = unsafe {
        sys::cublasLtMatmulAlgoCapGetAttribute(algorithm, attribute, ptr::from_mut(&mut value).cast(), 4, &mut written)
    };
    status.result().is_ok() && value != 0
}

/// An algorithm for people.
fn details(algorithm: &sys::cublasLtMatmulAlgo_t) -> String {
    use sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
    let names = [
        ("id", Attribute::CUBLASLT_ALGO_CONFIG_ID),
        ("tile", Attribute::CUBLASLT_ALGO_CONFIG_TILE_ID),
        ("stages", Attribute::CUBLASLT_ALGO_CONFIG_STAGES_ID),
        ("split", Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
        ("reduction", Attribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME),
        ("swizzle", Attribute::CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING),
        ("custom", Attribute::CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION),
        ("inner", Attribute::CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID),
        ("cluster", Attribute::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID),
    ];
    let known = names.into_iter().filter_map(|(name, attribute)| Some((name, configured(algorithm, attribute)?)));
    known.map(|(name, value)| format!("{name} {value}")).collect::<Vec<_>>().join(", ")
}

impl Library {
    /// Where its workspaces lie.
    pub fn workspaces(&self) -> [u64; BRANCHES] {
        self.workspaces
    }

    /// Loads the library and takes its workspaces; the GPU's context is current.
    pub fn open(sm: u32, out_of_memory: impl Fn(u64) -> Error) -> Result<Self, Error> {
        // SAFETY: loads a shared library by name and drops it again.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::NoGemmLibrary);
        }
        let handle = lt::create_handle().map_err(failed("cublasLtCreate"))?;
        let mut workspaces = [0; BRANCHES];
        for workspace in &mut workspaces {
            // SAFETY: a plain allocation, kept for the life of the process.
            *workspace = unsafe { cu::malloc_sync(WORKSPACE) }.map_err(|_| out_of_memory(WORKSPACE as u64))?;
        }
        Ok(Self {
            handle,
            workspaces,
            // SAFETY: returns a number.
            version: unsafe { sys::cublasLtGetVersion() },
            sm,
            table: table::read()?,
            plans: HashMap::new(),
            choices: Vec::new(),
            asked: None,
        })
    }

    /// What was chosen for every product so far.
    pub fn choices(&self) -> Vec<Choice> {
        self.choices.clone()
    }

    /// Forgets all plans and takes the suggestion of this number from here on, or the usual choice.
    pub fn ask(&mut self, suggestion: Option<usize>) {
        self.asked = suggestion;
        self.plans.clear();
        self.choices.clear();
    }

    /// Launches a product on the stream, or records it on a branch; false if there is no algorithm for it.
    pub fn launch(&mut self, call: &Call, at: &Addresses, stream: &CudaStream, branch: usize) -> Result<bool, Error> {
        let class = |at: u64| if at.is_multiple_of(WIDEST) { WIDEST as u32 } else { size_of::<f32>() as u32 };
        let alignments = [at.a, at.b, at.added, at.out].map(class);
        let key = (*call, alignments);
        if !self.plans.contains_key(&key) {
            let plan = self.plan(call, alignments, at.added)?;
            self.plans.insert(key, plan);
        }
        let Some(plan) = &self.plans[&key] else { return Ok(false) };
        let (one, zero) = (1.0f32, 0.0f32);
        let beta = if matches!(call.added, Added::Matrix | Added::Destination) { &one } else { &zero };
        if call.added == Added::Row {
            plan.description.set_row(at.added)?;
        }
        let third = if call.added == Added::Matrix { at.added } else { at.out };
        // SAFETY: the descriptors are alive, the caller promises the matrices, and the workspace is as large as the plan
        // was made for.
        unsafe {
            lt::matmul(
                self.handle,
                plan.description.0,
                bytes(&one).0,
                bytes(beta).0,
                at.b as *const c_void,
                plan.first.0,
                at.a as *const c_void,
                plan.second.0,
                third as *const c_void,
                plan.out.0,
                at.out as *mut c_void,
                plan.out.0,
                &plan.algorithm,
                self.workspaces[branch] as *mut c_void,
                WORKSPACE,
                stream.cu_stream().cast(),
            )
        }
        .map_err(failed("cublasLtMatmul"))?;
        Ok(true)
    }

    /// Describes a product to the library and chooses its algorithm.
    fn plan(&mut self, call: &Call, alignments: [u32; 4], added: u64) -> Result<Option<Plan>, Error> {
        let Call { batch, m, k, n, a, b, .. } = *call;
        let sides = |transposed: bool, rows: usize, columns: usize| {
            // What is stored in rows is columns to the library.
            if transposed { (rows, columns) } else { (columns, rows) }
        };
        let ((b_rows, b_columns), (a_rows, a_columns)) = (sides(b.transposed, k, n), sides(a.transposed, m, k));
        let description = Description::new(call, added)?;
        let first = Layout::new(call.narrow, b_rows, b_columns, batch, b)?;
        let second = Layout::new(call.narrow, a_rows, a_columns, batch, a)?;
        let out = Layout::new(false, n, m, batch, call.out)?;
        let plan = Plan { description, first, second, out, algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] } };
        let suggestions = self.suggestions(&plan, call, alignments)?;
        // The library's check does not look at addresses, and the table was measured with aligned ones.
        let aligned = alignments.iter().all(|&alignment| u64::from(alignment) == WIDEST);
        let measured = self.table.get(&Key::of(self.sm, self.version, call)).filter(|_| aligned).copied();
        let measured = measured.map(|data| sys::cublasLtMatmulAlgo_t { data });
        let (algorithm, source) = match (self.asked, measured) {
            (Some(number), _) if number < suggestions.len() => (Some(suggestions[number]), Source::Asked(number)),
            (_, Some(algorithm)) if self.fits(&plan, call, &algorithm) => (Some(algorithm), Source::Table),
            _ => match suggestions.first() {
                Some(&algorithm) => (Some(algorithm), Source::Heuristic),
                None => (None, Source::Kernel),
            },
        };
        self.choices.push(Choice {
            sm: self.sm,
            version: self.version,
            call: *call,
            alignments,
            algorithm: algorithm.map_or_else(String::new, |algorithm| table::word(&algorithm.data)),
            details: algorithm.as_ref().map_or_else(|| "the tiled kernel".to_owned(), details),
            source,
            suggestions: suggestions.len(),
        });
        Ok(algorithm.map(|algorithm| Plan { algorithm, ..plan }))
    }

    /// The library's suggestions that sum in a fixed order, its favourite first.
    fn suggestions(
        &self,
        plan: &Plan,
        call: &Call,
        alignments: [u32; 4],
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, Error> {
        let preference = Preference::new(alignments)?;
        let mut results: [MaybeUninit<sys::cublasLtMatmulHeuristicResult_t>; SUGGESTIONS] =
            [const { MaybeUninit::uninit() }; SUGGESTIONS];
        let mut found = 0;
        // SAFETY: the descriptors are alive; at most SUGGESTIONS results are written.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                plan.description.0,
                plan.first.0,
                plan.second.0,
                plan.out.0,
                plan.out.0,
                preference.0,
                SUGGESTIONS as i32,
                results.as_mut_ptr().cast(),
                &mut found,
            )
        };
        match status {
            // No algorithm at all, or none for strides like these, is an answer and no failure: [`Choice`] shows it.
            sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED | sys::cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE => {
                return Ok(Vec::new());
            }
            status => status.result().map_err(failed("cublasLtMatmulAlgoGetHeuristic"))?,
        }
        let found = usize::try_from(found).unwrap_or(0);
        // SAFETY: the library has written the first `found`.
        let results = results.iter().take(found).map(|result| unsafe { result.assume_init_ref() });
        Ok(results.filter(|result| usable(call, result)).map(|result| result.algo).collect())
    }

    /// Whether an algorithm of the table can compute this product.
    fn fits(&self, plan: &Plan, call: &Call, algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
        // The check fills in the needs of an algorithm and leaves the rest as it is.
        let mut result: sys::cublasLtMatmulHeuristicResult_t = sys::cublasLtMatmulHeuristicResult_t {
            algo: *algorithm,
            workspaceSize: 0,
            state: sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS,
            wavesCount: 0.0,
            reserved: [0; 4],
        };
        // SAFETY: the descriptors are alive; one result is written.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                self.handle,
                plan.description.0,
                plan.first.0,
                plan.second.0,
                plan.out.0,
                plan.out.0,
                algorithm,
                &mut result,
            )
        };
        status.result().is_ok() && usable(call, &result)
    }
}

/// Whether an algorithm is complete, has enough workspace, and sums in a fixed order.
fn usable(call: &Call, result: &sys::cublasLtMatmulHeuristicResult_t) -> bool {
    use sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
    use sys::cublasLtReductionScheme_t as Scheme;
    let scheme = configured(&result.algo, Attribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME);
    let fixed = [Scheme::CUBLASLT_REDUCTION_SCHEME_NONE, Scheme::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE];
    result.state.result().is_ok()
        && result.workspaceSize <= WORKSPACE
        && fixed.iter().any(|&allowed| scheme == Some(allowed as u32))
        && (call.added != Added::Matrix || adds_another(&result.algo))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Needs the library and no GPU: every descriptor with the size of each of its attributes.
    #[test]
    fn the_library_takes_every_description() {
        // SAFETY: loads a shared library by name and drops it again.
        if !unsafe { sys::is_culib_present() } {
            eprintln!("NOTRUN: {}", Error::NoGemmLibrary);
            return;
        }
        let stored = |transposed| Stored { transposed, row: 24, next: 480 };
        let kinds = [Precision::Full, Precision::Tf32, Precision::Bf16].map(|precision| (precision, false));
        for (precision, narrow) in kinds.into_iter().chain([(Precision::Bf16, true)]) {
            for added in [Added::Nothing, Added::Row, Added::Matrix, Added::Destination] {
                let (a, b, out) = (stored(false), stored(true), stored(false));
                let call = Call { precision, narrow, batch: 3, m: 20, k: 24, n: 20, a, b, added, out };
                Description::new(&call, 512).unwrap().set_row(1024).unwrap();
                Layout::new(narrow, 24, 20, call.batch, call.a).unwrap();
                Preference::new([4, 16, 16, 4]).unwrap();
            }
        }
    }
}
