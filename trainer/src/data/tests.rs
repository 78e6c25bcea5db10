//! Tests of `data`.

use std::collections::HashSet;

use super::{
    Corpus, Data, DataError, EvalWindows, KeyPlan, Manifest, Prefetch, Segment, TrainWindows, block_len,
    held_out_blocks, permute, span_mask, split,
};
use crate::config::{Config, JepaMode, preset};

fn config() -> Config {
    preset("tiny").unwrap()
}

fn varied(len: usize) -> Vec<u8> {
    (0..len).map(|i| blake3::hash(&(i as u64).to_le_bytes()).as_bytes()[0]).collect()
}

#[test]
fn the_split_follows_its_formula() {
    assert_eq!(block_len(10), 4096);
    assert_eq!(block_len(1 << 20), 16384);
    assert_eq!(block_len(1 << 40), 65536);
    assert_eq!(held_out_blocks(1).len(), 1);
    assert_eq!(held_out_blocks(16).len(), 1);
    assert_eq!(held_out_blocks(17).len(), 2);
    let held = held_out_blocks(64);
    assert_eq!(held.len(), 4);
    // Those four and no others have the smallest hashes.
    let hash = |i: u64| *blake3::hash(&i.to_le_bytes()).as_bytes();
    let worst = held.iter().map(|&i| hash(i)).max().unwrap();
    assert_eq!((0..64).filter(|&i| hash(i) <= worst).count(), 4);
}

#[test]
fn the_two_splits_cover_every_byte_once() {
    for len in [1, 4095, 4096, 4097, 8193, 100_000, 952_773, 5_000_001] {
        let (train, eval) = split(len);
        let mut all: Vec<Segment> = train.iter().chain(&eval).copied().collect();
        all.sort_by_key(|segment| segment.start);
        assert_eq!(all[0].start, 0);
        assert_eq!(all.last().unwrap().end, len);
        assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start), "{len}: gap or overlap");
        assert!(train.windows(2).all(|pair| pair[0].end < pair[1].start), "{len}: neighbours not joined");
        assert!(!eval.is_empty());
    }
}

#[test]
fn permutations_reach_every_index_and_differ_between_epochs() {
    for n in [1, 2, 3, 7, 64, 65, 1000, 4097] {
        let image: HashSet<u64> = (0..n).map(|i| permute(5, 2, i, n)).collect();
        assert_eq!(image.len() as u64, n);
        assert!(image.iter().all(|&i| i < n));
    }
    let order = |seed, epoch| -> Vec<u64> { (0..1000).map(|i| permute(seed, epoch, i, 1000)).collect() };
    assert_ne!(order(5, 0), order(5, 1));
    assert_ne!(order(5, 0), order(6, 0));
    assert_eq!(order(5, 0), order(5, 0));
    let fixed = order(5, 0).iter().enumerate().filter(|(i, image)| *i as u64 == **image).count();
    assert!(fixed < 10, "{fixed} of 1000 indices stay where they are");
}

#[test]
fn an_epoch_predicts_every_training_byte_and_stays_inside_the_split() {
    let len = 300_000u64;
    let (train, eval) = split(len);
    let windows = TrainWindows::new(train.clone(), 64, 9);
    let n = windows.windows_per_epoch();
    let mut predicted = vec![0u32; len as usize];
    for row in 0..n {
        let window = windows.row(0, row, n);
        let segment = train.iter().find(|s| s.start <= window.start && window.start < s.end).unwrap();
        assert!(window.start + window.len as u64 <= segment.end, "a window crosses a split border");
        for position in window.start + 1..window.start + window.len as u64 {
            predicted[position as usize] += 1;
        }
    }
    for segment in &train {
        assert_eq!(predicted[segment.start as usize], 0);
        let tail = segment.end - 64;
        for position in segment.start + 1..segment.end {
            let times = predicted[position as usize];
            // Only bytes under the last window, moved back to end with the segment, may be predicted twice.
            let most = if position >= tail { 2 } else { 1 };
            assert!((1..=most).contains(&times), "byte {position} predicted {times} times");
        }
    }
    for segment in &eval {
        assert!((segment.start..segment.end).all(|position| predicted[position as usize] == 0));
    }
}

#[test]
fn rows_run_on_from_step_to_step_and_into_the_next_epoch() {
    let windows = TrainWindows::new(vec![Segment { start: 0, end: 641 }], 64, 1);
    assert_eq!(windows.windows_per_epoch(), 10);
    let row = |position: u64| windows.row(position / 4, position % 4, 4);
    let epoch = |e: u64| (10 * e..10 * e + 10).map(|p| row(p).start).collect::<HashSet<u64>>();
    assert_eq!(epoch(0).len(), 10);
    assert_eq!(epoch(1).len(), 10);
    assert_eq!(windows.epochs(5, 4), 2.0);
    // The same rows in other batch shapes: only the position in the stream of rows counts.
    assert_eq!(windows.row(1, 2, 4), windows.row(0, 6, 8));
}

#[test]
fn targets_are_the_next_bytes_of_the_same_row() {
    let data = Data::new(&config(), Corpus::from_bytes("m", varied(60_000)), None).unwrap();
    let batch = data.batch(3, 4).unwrap();
    let (ids, targets) = (batch.ids(), batch.targets());
    assert_eq!((ids.dim(), targets.dim()), ((4, 64), (4, 64)));
    for row in 0..4 {
        for p in 0..63 {
            assert_eq!(targets[[row, p]], ids[[row, p + 1]]);
        }
        assert_eq!(targets[[row, 63]], batch.bytes[row * 65 + 64]);
        let window = data.train.row(3, row as u64, 4);
        assert_eq!(ids.row(row).to_vec(), data.corpus.read(window.start, 64).unwrap());
    }
}

#[test]
fn evaluation_windows_are_fixed_disjoint_and_fewer_when_little_is_held_out() {
    let segments = [Segment { start: 100, end: 1200 }, Segment { start: 5000, end: 5513 }];
    let all = EvalWindows::new(&segments, 512, 64);
    let starts: Vec<u64> = all.windows().iter().map(|window| window.start).collect();
    assert_eq!(starts, [100, 612, 5000]);
    assert_eq!(all.positions(), 3 * 512);
    let two = EvalWindows::new(&segments, 512, 2);
    assert_eq!(two.windows().iter().map(|window| window.start).collect::<Vec<_>>(), [100, 612]);
    let many = EvalWindows::new(&[Segment { start: 0, end: 100_001 }], 100, 10);
    assert!(many.windows().windows(2).all(|pair| pair[1].start - pair[0].start == 10_000));
    let data = Data::new(&config(), Corpus::shipped(), None).unwrap();
    assert_eq!(data.eval.windows().len(), 64);
    assert_eq!(data.eval_windows().unwrap()[0].len(), 513);
}

#[test]
fn folders_are_one_stream_in_sorted_order() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("b")).unwrap();
    for (name, text) in [("c", "5"), ("a", "12"), ("b/x", "34"), ("b/empty", "")] {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let corpus = Corpus::open(folder.path()).unwrap();
    assert_eq!((corpus.len(), corpus.files()), (5, 4));
    assert_eq!(corpus.read(0, 5).unwrap(), b"12345");
    assert_eq!(corpus.read(1, 3).unwrap(), b"234");
    assert_eq!(corpus.read(4, 1).unwrap(), b"5");
    assert_eq!(corpus.read(2, 0).unwrap(), b"");
}

#[test]
fn what_is_no_file_is_left_out_and_named_and_a_link_to_nothing_is_refused() {
    use std::os::unix::fs::symlink;
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::create_dir(at("sub")).unwrap();
    std::fs::write(at("sub/a"), "123").unwrap();
    symlink(at("sub/a"), at("file")).unwrap();
    assert!(Corpus::open(folder.path()).unwrap().left_out().is_empty());
    symlink(at("sub"), at("loop")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
    let corpus = Corpus::open(folder.path()).unwrap();
    assert_eq!((corpus.len(), corpus.files()), (6, 2));
    let left: Vec<_> = corpus.left_out().iter().map(|path| path.file_name().unwrap()).collect();
    assert_eq!(left, ["loop", "socket"]);
    let refused = |path: &std::path::Path, words: [&str; 2]| {
        let error = Corpus::open(path).unwrap_err();
        assert!(matches!(error, DataError::Dangling { .. }), "{error}");
        let [link, target] =
            words.map(|word| format!("`{}`", folder.path().canonicalize().unwrap().join(word).display()));
        let error = error.to_string();
        assert!(
            error.contains(&format!("{link} is a link to {target}")) && error.contains("remove the link"),
            "{error}"
        );
    };
    symlink("gone", at("sub/dangling")).unwrap();
    refused(folder.path(), ["sub/dangling", "sub/gone"]);
    // The link at which a chain of them ends, and one that is named itself.
    std::fs::remove_file(at("sub/dangling")).unwrap();
    symlink("sub/next", at("first")).unwrap();
    symlink("gone", at("sub/next")).unwrap();
    refused(&folder.path().canonicalize().unwrap().join("first"), ["first", "sub/gone"]);
    // A link in a circle is no missing file.
    for name in ["first", "sub/next"] {
        std::fs::remove_file(at(name)).unwrap();
    }
    symlink("round", at("round")).unwrap();
    let error = Corpus::open(folder.path()).unwrap_err();
    assert!(matches!(&error, DataError::Unreadable { path, .. } if path.ends_with("round")), "{error}");
}

#[test]
fn a_file_that_is_written_to_or_replaced_is_noticed_when_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text");
    let wait = || std::thread::sleep(std::time::Duration::from_millis(50));
    let changed = |corpus: &Corpus| {
        assert!(matches!(corpus.read(0, 3), Err(DataError::Changed { .. })));
        assert!(matches!(corpus.check_unchanged(), Err(DataError::Changed { .. })));
        assert!(matches!(Manifest::of(corpus, None), Err(DataError::Changed { .. })));
    };
    std::fs::write(&path, "some text").unwrap();
    let corpus = Corpus::open(&path).unwrap();
    assert_eq!(corpus.read(0, 4).unwrap(), b"some");
    corpus.check_unchanged().unwrap();
    wait();
    std::fs::write(&path, "same size").unwrap();
    changed(&corpus);
    let corpus = Corpus::open(&path).unwrap();
    std::fs::write(folder.path().join("other"), "same size").unwrap();
    std::fs::rename(folder.path().join("other"), &path).unwrap();
    changed(&corpus);
    let corpus = Corpus::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(corpus.check_unchanged(), Err(DataError::Unreadable { .. })));
}

/// A quarter of a million splits of a gigabyte each would be hours.
#[test]
fn windows_that_are_far_too_long_are_refused_at_once() {
    let began = std::time::Instant::now();
    for (seq_bytes, eval_bytes) in [(1 << 24, 64), (64, 1 << 24)] {
        let mut config = config();
        (config.data.seq_bytes, config.data.eval_bytes) = (seq_bytes, eval_bytes);
        let error = Data::new(&config, Corpus::shipped(), None).err().unwrap();
        assert!(matches!(error, DataError::TooSmall { needed, .. } if needed > 1 << 24), "{error}");
    }
    assert!(began.elapsed() < std::time::Duration::from_secs(60), "{:?}", began.elapsed());
}

#[test]
fn unusable_corpora_say_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data");
    assert!(matches!(Corpus::open(&path), Err(DataError::Missing { .. })));
    for (bytes, size) in [("", 0), ("x", 1)] {
        std::fs::write(&path, bytes).unwrap();
        match Corpus::open(&path) {
            Err(DataError::TooSmall { bytes, needed: 2, .. }) => assert_eq!(bytes, size),
            other => panic!("{other:?}"),
        }
    }
    std::fs::write(&path, "").unwrap();
    assert!(matches!(Corpus::open(folder.path()), Err(DataError::EmptyFolder { .. })));
    assert!(matches!(Corpus::open("/dev/null".as_ref()), Err(DataError::NotAFile { .. })));
    // 4096 bytes are one block, which is held out; of 4160 the 64 bytes of the second are, less than a window.
    for (len, fix) in [(2, "data.seq_bytes"), (4096, "data.seq_bytes"), (4160, "data.eval_bytes")] {
        match Data::new(&config(), Corpus::from_bytes("m", varied(len)), None).err() {
            Some(DataError::TooSmall { bytes, needed, fix: got, .. }) => {
                assert!(bytes == len as u64 && got.contains(fix), "{bytes} {got}");
                // What the message asks for is enough.
                assert!(Data::new(&config(), Corpus::from_bytes("m", varied(needed as usize)), None).is_ok());
            }
            other => panic!("{other:?}"),
        }
    }
    // With its own held-out file a small corpus will do.
    let eval = Corpus::from_bytes("e", varied(600));
    assert!(Data::new(&config(), Corpus::from_bytes("m", vec![7; 65]), Some(eval)).is_ok());
    let eval = Corpus::from_bytes("e", varied(512));
    let error = Data::new(&config(), Corpus::from_bytes("m", vec![7; 65]), Some(eval)).err().unwrap().to_string();
    assert!(error.contains("`e` has 512 bytes") && error.contains("data.eval_bytes"), "{error}");
}

#[test]
fn held_out_files_may_not_be_training_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::create_dir(path("train")).unwrap();
    std::fs::write(path("train/a"), varied(5000)).unwrap();
    std::fs::write(path("copy"), varied(5000)).unwrap();
    std::fs::write(path("other"), varied(4999)).unwrap();
    std::os::unix::fs::symlink(path("train/a"), path("link")).unwrap();
    let check = |eval: &str| {
        let (train, eval) = (Corpus::open(&path("train")).unwrap(), Corpus::open(&path(eval)).unwrap());
        Manifest::of(&train, Some(&eval)).unwrap().check_overlap()
    };
    for eval in ["train/a", "copy", "link", "train"] {
        assert!(matches!(check(eval), Err(DataError::Overlap { .. })), "{eval}");
    }
    check("other").unwrap();
}

#[test]
fn a_changed_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("a"), varied(100)).unwrap();
    std::fs::write(path("b"), varied(200)).unwrap();
    let manifest = |of: &std::path::Path| Manifest::of(&Corpus::open(of).unwrap(), None).unwrap();
    let then = manifest(folder.path());
    then.check_unchanged(&manifest(folder.path())).unwrap();

    let stored = serde_json::to_string(&then).unwrap();
    let then: Manifest = serde_json::from_str(&stored).unwrap();
    let mut bytes = varied(200);
    bytes[150] ^= 1;
    std::fs::write(path("b"), &bytes).unwrap();
    let error = then.check_unchanged(&manifest(folder.path())).unwrap_err().to_string();
    assert!(error.contains("/b` changed") && !error.contains("/a`"), "{error}");
    std::fs::write(path("b"), varied(200)).unwrap();
    std::fs::write(path("c"), "new").unwrap();
    let error = then.check_unchanged(&manifest(folder.path())).unwrap_err().to_string();
    assert!(error.contains("/c` changed") && error.contains("expected no file"), "{error}");
    std::fs::remove_file(path("c")).unwrap();
    std::fs::remove_file(path("b")).unwrap();
    let error = then.check_unchanged(&manifest(folder.path())).unwrap_err().to_string();
    assert!(error.contains("/b` changed") && error.contains("got no file"), "{error}");

    // The same bytes elsewhere are the same data.
    let moved = tempfile::tempdir().unwrap();
    std::fs::write(moved.path().join("a"), varied(100)).unwrap();
    std::fs::write(moved.path().join("b"), varied(200)).unwrap();
    then.check_unchanged(&manifest(moved.path())).unwrap();
    assert_eq!(then.hash(), manifest(moved.path()).hash());
    assert_ne!(then.hash(), manifest(folder.path()).hash());
}

#[test]
fn the_worker_gives_the_same_batches_and_passes_errors_on() {
    let data = Data::new(&config(), Corpus::from_bytes("m", varied(60_000)), None).unwrap();
    let start = |steps, one| Prefetch::start(data.corpus.clone(), data.train.clone(), 4, steps, one, None).unwrap();
    let mut worker = start(5..8, false);
    for step in 5..8 {
        assert_eq!(worker.next_batch().unwrap(), data.batch(step, 4).unwrap());
    }
    assert!(worker.next_batch().is_err());
    let mut one = start(5..8, true);
    assert_eq!(one.next_batch().unwrap().bytes, data.batch(0, 4).unwrap().bytes);
    assert_eq!(one.next_batch().unwrap().step, 6);
    let plan = Some(KeyPlan { table_rows: 100, parts: 2, jepa: JepaMode::Off });
    let keyed = Prefetch::start(data.corpus.clone(), data.train.clone(), 4, 5..6, false, plan).unwrap().next_batch();
    assert_eq!(keyed.unwrap(), data.batch(5, 4).unwrap().with_keys(plan));
    // Dropped with batches unread, the worker ends.
    drop(start(0..1_000_000, false));

    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), varied(60_000)).unwrap();
    let data = Data::new(&config(), Corpus::open(file.path()).unwrap(), None).unwrap();
    std::fs::write(file.path(), "cut short").unwrap();
    let mut worker = Prefetch::start(data.corpus.clone(), data.train.clone(), 4, 0..9, false, None).unwrap();
    let error = worker.next_batch().unwrap_err();
    assert_eq!(crate::exit::Exit::of(&error), crate::exit::Exit::Data);
}

#[test]
fn a_file_that_shrinks_is_named_with_what_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text");
    std::fs::write(&path, [7; 100]).unwrap();
    let corpus = Corpus::open(&path).unwrap();
    assert_eq!(corpus.read(60, 40).unwrap(), [7; 40]);
    std::fs::write(&path, [7; 90]).unwrap();
    let error = corpus.read(60, 40).unwrap_err().to_string();
    assert!(error.contains("expected 100 bytes, got an end before byte 100"), "{error}");
}

#[test]
fn a_batch_has_the_masks_of_its_seed_step_and_rows_and_of_nothing_else() {
    let mut config = config();
    assert!(Data::open(&config).unwrap().batch(3, 2).unwrap().mask.is_none());
    for mode in [JepaMode::Shared, JepaMode::Separate] {
        config.jepa.mode = mode;
        let data = Data::open(&config).unwrap();
        let len = config.data.seq_bytes;
        let mask = data.batch(3, 2).unwrap().mask.unwrap();
        assert_eq!(mask, [span_mask(config.seed, 3, 0, len), span_mask(config.seed, 3, 1, len)].concat());
        // More rows, other data: the masks that were there stay.
        assert_eq!(data.batch(3, 4).unwrap().mask.unwrap()[..2 * len], mask);
        let other = Corpus::from_bytes("other", varied(300_000));
        assert_eq!(Data::new(&config, other, None).unwrap().batch(3, 2).unwrap().mask.unwrap(), mask);
        assert_ne!(data.batch(4, 2).unwrap().mask.unwrap(), mask);
        let seeded = Config { seed: 1, ..config.clone() };
        assert_ne!(Data::open(&seeded).unwrap().batch(3, 2).unwrap().mask.unwrap(), mask);
        // The worker hands over the same, and with one batch the mask is that batch's.
        let mut worker = Prefetch::start(data.corpus.clone(), data.train.clone(), 2, 3..5, false, None).unwrap();
        assert_eq!(worker.next_batch().unwrap().mask, Some(mask.clone()));
        let mut worker = Prefetch::start(data.corpus.clone(), data.train.clone(), 2, 3..5, true, None).unwrap();
        assert_eq!(worker.next_batch().unwrap().mask, data.batch(0, 2).unwrap().mask);
    }
}
