//! Tests of `checkpoint`.

use std::path::Path;
use std::sync::Arc;

use super::{
    CheckpointError, Facts, State, Tensor, best_good, folder_name, list, load, newest_good, retain, save, verify,
};
use crate::host_table::HostTable;

fn state(step: u64) -> State {
    let mut state = State { updates: step, ..State::default() };
    let values = (0..6).map(|i| (i as f32 - 2.5) * step as f32).collect();
    state.weights.insert("block.w".into(), Tensor::f32(&[2, 3], values));
    state.weights.insert("scalar".into(), Tensor::f32(&[], vec![f32::MIN_POSITIVE / 2.0]));
    state.optimizer.insert("block.w.m".into(), Tensor::f32(&[2, 3], vec![-0.0, f32::NAN, 1.0, 2.0, 3.0, 4.0]));
    state.optimizer.insert("counters".into(), Tensor::u32(&[2], vec![step as u32, u32::MAX]));
    state.optimizer.insert("none".into(), Tensor::f32(&[0, 4], vec![]));
    state
}

fn facts(step: u64, eval_bpb: Option<f64>) -> Facts {
    Facts {
        next_step: step,
        rows_consumed: 8 * step,
        eval_bpb,
        config_toml: "seed = 1\n".into(),
        config_hash: "c".into(),
        data_hash: "d".into(),
        provenance: serde_json::json!({"version": "x"}),
        run: Some(crate::backend::Facts { backend: "cpu".into(), ..Default::default() }),
    }
}

fn bits(state: &State) -> Vec<(String, Vec<u32>)> {
    let all = state.weights.iter().chain(&state.optimizer);
    all.map(|(name, tensor)| {
        let floats = tensor.as_f32().map(|values| values.iter().map(|value| value.to_bits()).collect());
        (name.clone(), floats.unwrap_or_else(|| tensor.as_u32().unwrap().to_vec()))
    })
    .collect()
}

fn steps(parent: &Path) -> Vec<u64> {
    super::store::folders(parent).unwrap().into_iter().map(|(step, _)| step).collect()
}

#[test]
fn a_manifest_of_another_step_than_its_folder_is_damaged() {
    let folder = tempfile::tempdir().unwrap();
    for step in [100, 200] {
        save(folder.path(), &state(step), &facts(step, None)).unwrap();
    }
    std::fs::rename(folder.path().join("step_000200"), folder.path().join("step_000201")).unwrap();
    let found = newest_good(folder.path()).unwrap();
    assert_eq!(found.loaded.manifest.next_step, 100);
    assert!(found.skipped[0].contains("manifest.json says step 200"), "{:?}", found.skipped);
}

#[test]
fn no_fact_of_a_manifest_can_be_changed_unseen() {
    let folder = tempfile::tempdir().unwrap();
    let path = save(folder.path(), &state(200), &facts(200, Some(1.5))).unwrap();
    let file = path.join(super::MANIFEST);
    let good = std::fs::read_to_string(&file).unwrap();
    for (from, to) in [
        ("\"updates\": 200", "\"updates\": 199"),
        ("\"rows_consumed\": 1600", "\"rows_consumed\": 1608"),
        ("\"eval_bpb\": 1.5", "\"eval_bpb\": 1.4"),
        ("\"config_hash\": \"c\"", "\"config_hash\": \"e\""),
        ("\"data_hash\": \"d\"", "\"data_hash\": \"e\""),
        ("\"backend\": \"cpu\"", "\"backend\": \"cuda\""),
    ] {
        assert!(good.contains(from), "{good}");
        std::fs::write(&file, good.replace(from, to)).unwrap();
        let error = load(&path).unwrap_err();
        assert!(matches!(error, CheckpointError::Damaged { .. }), "{error}");
        assert!(error.to_string().contains("manifest.json was changed: it has CRC-32C "), "{error}");
    }
    // One that has lost its checksum, and one from before there was one.
    let (body, _) = good.rsplit_once(super::SEAL).unwrap();
    std::fs::write(&file, format!("{body}\n}}")).unwrap();
    assert!(load(&path).unwrap_err().to_string().contains("manifest.json has no checksum"));
    std::fs::write(&file, format!("{body}\n}}").replace("\"format\": 2", "\"format\": 1")).unwrap();
    let error = load(&path).unwrap_err().to_string();
    assert!(error.ends_with("has format 1, expected 2; use the version of dormouse that wrote it"), "{error}");
    std::fs::write(&file, good).unwrap();
    load(&path).unwrap();
}

#[test]
fn what_is_saved_is_loaded_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let path = save(folder.path(), &state(200), &facts(200, Some(1.5))).unwrap();
    assert_eq!(path.file_name().unwrap(), "step_000200");
    let loaded = load(&path).unwrap();
    assert_eq!(bits(&loaded.state), bits(&state(200)));
    assert_eq!(loaded.state.weights["block.w"].shape, [2, 3]);
    assert_eq!(loaded.state.optimizer["none"].shape, [0, 4]);
    assert_eq!((loaded.manifest.next_step, loaded.state.updates, loaded.manifest.rows_consumed), (200, 200, 1600));
    assert_eq!(loaded.config_toml, "seed = 1\n");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn every_damaged_byte_and_every_cut_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let path = save(folder.path(), &state(3), &facts(3, None)).unwrap();
    for name in [super::WEIGHTS, super::OPTIMIZER, super::CONFIG] {
        let file = path.join(name);
        let good = std::fs::read(&file).unwrap();
        for position in 0..good.len() {
            let mut bad = good.clone();
            bad[position] ^= 1;
            std::fs::write(&file, &bad).unwrap();
            assert!(matches!(verify(&path), Err(CheckpointError::Damaged { .. })), "{name} byte {position}");
        }
        for len in [0, 1, good.len() - 1] {
            std::fs::write(&file, &good[..len]).unwrap();
            let error = verify(&path).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(&format!("has {len} bytes")), "{error}");
        }
        std::fs::remove_file(&file).unwrap();
        assert!(matches!(load(&path), Err(CheckpointError::Damaged { .. })));
        std::fs::write(&file, &good).unwrap();
        verify(&path).unwrap();
    }
    let file = path.join(super::MANIFEST);
    let good = std::fs::read_to_string(&file).unwrap();
    for len in 0..good.len() {
        std::fs::write(&file, &good[..len]).unwrap();
        assert!(verify(&path).is_err(), "manifest cut to {len}");
    }
    for position in 0..good.len() {
        let mut bad = good.clone().into_bytes();
        bad[position] ^= 1;
        std::fs::write(&file, &bad).unwrap();
        assert!(verify(&path).is_err(), "manifest byte {position}");
    }
    std::fs::write(&file, good.replace("\"format\": 2", "\"format\": 3")).unwrap();
    assert!(matches!(verify(&path), Err(CheckpointError::Format { got: 3, .. })));
}

/// Bytes that this thread has read from files.
fn bytes_read() -> u64 {
    let facts = std::fs::read_to_string("/proc/thread-self/io").unwrap();
    facts.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

#[test]
fn a_table_is_read_once_and_its_damage_is_named_in_words() {
    let folder = tempfile::tempdir().unwrap();
    let table = Arc::new(HostTable::new(32, vec![0.5; 1 << 18]));
    let path = save(folder.path(), &State { table: Some(table.clone()), ..state(3) }, &facts(3, None)).unwrap();
    let file = path.join(super::TABLE);
    let size = std::fs::metadata(&file).unwrap().len();
    let before = bytes_read();
    assert_eq!(load(&path).unwrap().state.table.as_ref(), Some(&table));
    // All the rest of this checkpoint has a few kilobytes.
    let read = bytes_read() - before;
    assert!((size..size + 20_000).contains(&read), "{read} bytes were read for a table of {size}");
    // A table that is whole, of this step, and not the one that was saved.
    HostTable::new(32, vec![0.25; 1 << 18]).save(&file, 3).unwrap();
    for error in [verify(&path).unwrap_err(), load(&path).unwrap_err()] {
        let text = error.to_string();
        assert!(text.contains("engram.table has CRC-32C ") && text.contains(", expected "), "{text}");
        assert!(!text.contains("FileEntry"), "{text}");
    }
    table.save(&file, 3).unwrap();
    verify(&path).unwrap();
    let mut bytes = std::fs::read(&file).unwrap();
    for at in [50, bytes.len() - 1] {
        bytes[at] ^= 1;
        std::fs::write(&file, &bytes).unwrap();
        assert!(load(&path).is_err() && verify(&path).is_err(), "byte {at}");
        bytes[at] ^= 1;
    }
    std::fs::write(&file, "short").unwrap();
    assert!(verify(&path).unwrap_err().to_string().contains(&format!("has 5 bytes, expected {size}")));
    assert!(matches!(load(&path), Err(CheckpointError::Table(_))));
    std::fs::remove_file(&file).unwrap();
    assert!(verify(&path).is_err() && load(&path).is_err());
}

#[test]
fn discovery_falls_back_to_the_newest_good_one_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(newest_good(folder.path()), Err(CheckpointError::NoneGood { .. })));
    assert!(matches!(newest_good(&folder.path().join("missing")), Err(CheckpointError::NoneGood { .. })));
    for step in [100, 200, 1_000_000] {
        save(folder.path(), &state(step), &facts(step, None)).unwrap();
    }
    // A killed save left this one: the name alone rules it out.
    std::fs::create_dir(folder.path().join("step_2000000.tmp")).unwrap();
    let found = newest_good(folder.path()).unwrap();
    assert_eq!((found.loaded.manifest.next_step, found.skipped.len()), (1_000_000, 0));
    std::fs::write(folder.path().join("step_1000000").join(super::WEIGHTS), "short").unwrap();
    let found = newest_good(folder.path()).unwrap();
    assert_eq!(found.loaded.manifest.next_step, 200);
    assert!(
        found.skipped[0].contains("step_1000000") && found.skipped[0].contains("has 5 bytes"),
        "{:?}",
        found.skipped
    );
    for step in [100, 200] {
        std::fs::remove_file(folder.path().join(folder_name(step)).join(super::MANIFEST)).unwrap();
    }
    let error = newest_good(folder.path()).unwrap_err().to_string();
    assert!(["step_1000000", "step_000200", "step_000100"].iter().all(|name| error.contains(name)), "{error}");
}

#[test]
fn a_killed_save_is_swept_away_and_a_step_can_be_saved_again() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(folder.path().join("step_000050.tmp/deep")).unwrap();
    std::fs::create_dir(folder.path().join("mine.tmp")).unwrap();
    save(folder.path(), &state(60), &facts(60, None)).unwrap();
    std::fs::write(folder.path().join("step_000060").join(super::OPTIMIZER), "bad").unwrap();
    save(folder.path(), &state(60), &facts(60, Some(2.0))).unwrap();
    assert_eq!(newest_good(folder.path()).unwrap().loaded.manifest.eval_bpb, Some(2.0));
    let mut names: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["mine.tmp", "step_000060"]);
}

#[test]
fn retention_keeps_the_newest_the_best_and_the_milestones() {
    let folder = tempfile::tempdir().unwrap();
    let bpb = [3.0, 2.0, 2.5, 2.4, f64::NAN, 2.6];
    for (index, bpb) in bpb.iter().enumerate() {
        let step = 100 * (index as u64 + 1);
        save(folder.path(), &state(step), &facts(step, bpb.is_finite().then_some(*bpb))).unwrap();
    }
    assert_eq!(best_good(folder.path()).unwrap().loaded.manifest.next_step, 200);
    assert!(list(folder.path()).unwrap().iter().all(|(_, outcome)| outcome.is_ok()));
    let removed = retain(folder.path(), 600, 2, 300).unwrap();
    assert_eq!(steps(folder.path()), [200, 300, 500, 600]);
    assert_eq!(removed.len(), 2);
    retain(folder.path(), 600, 1, 0).unwrap();
    assert_eq!(steps(folder.path()), [200, 600]);
}

#[test]
fn retention_never_removes_the_one_just_verified() {
    let folder = tempfile::tempdir().unwrap();
    for step in [100, 200, 300] {
        save(folder.path(), &state(step), &facts(step, None)).unwrap();
    }
    // 300 is damaged, the run went on from 200 and saved 250: the only good new one.
    std::fs::write(folder.path().join("step_000300").join(super::WEIGHTS), "bad").unwrap();
    save(folder.path(), &state(250), &facts(250, None)).unwrap();
    retain(folder.path(), 250, 1, 0).unwrap();
    assert_eq!(newest_good(folder.path()).unwrap().loaded.manifest.next_step, 250);
    assert_eq!(steps(folder.path()), [250, 300]);
}

#[test]
fn a_save_that_cannot_be_written_says_why_and_leaves_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let parent = folder.path().join("checkpoints");
    std::fs::write(&parent, "a file in the way").unwrap();
    let error = save(&parent, &state(1), &facts(1, None)).unwrap_err();
    assert!(error.to_string().contains("checkpoints"), "{error}");
    let error = super::disk::check_space(folder.path(), u64::MAX / 2).unwrap_err().to_string();
    assert!(error.contains("bytes, ") && error.contains("are free"), "{error}");
    assert!(super::free_bytes(folder.path()).unwrap() > 0);
}

#[test]
fn what_may_not_be_read_is_to_be_made_readable() {
    let fix = |operation| {
        let cause = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        super::disk::io_error(operation, Path::new("x"), cause).to_string()
    };
    for operation in ["read", "list"] {
        assert!(fix(operation).ends_with("; make it readable for this user"), "{}", fix(operation));
    }
    assert!(fix("write").ends_with("; make the folder writable, or use another with --runs"));
}
