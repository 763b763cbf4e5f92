//! Fuzz targets: container log lines and log options.

use berth::logs::{self, Filter, Head, LineStream, LogOptions, LogStreams, Stamp};

/// The prefix of a CRI log line: timestamp, stream, and tags.
pub fn log_cri(data: &[u8]) {
    let Head::Parsed(whole) = logs::head(data) else { return };
    assert!(whole.content <= data.len());
    check_stamp(whole.time);
    for end in 0..whole.content {
        let before = logs::head(data.get(..end).expect("content is within the line"));
        assert!(before == Head::Incomplete, "{before:?} of the first {end} bytes");
    }
}

fn check_stamp(stamp: Stamp<'_>) {
    let mut out = Vec::new();
    stamp.write(&mut out);
    let written = String::from_utf8(out).expect("times are text");
    assert_eq!(Stamp::parse(&written).map(|s| s.nanos()), Some(stamp.nanos()), "{written}");
    assert!(written.len() <= 40);
}

/// A line of Docker's `json-file` driver.
pub fn log_docker(data: &[u8]) {
    let Ok(line) = logs::docker(data) else { return };
    let (stamp, _) = line.origin().expect("a line that was read has an origin");
    check_stamp(stamp);
    assert!(line.log.len() <= data.len() * 3);
}

/// A whole log file; the first two bytes select the log options.
pub fn log_filter(data: &[u8]) {
    let Some(([flags, cut], log)) = data.split_first_chunk::<2>() else { return };
    let options = LogOptions {
        tail: (flags & 1 != 0).then_some(u64::from(flags >> 5)),
        since: (flags & 2 != 0).then_some(jiff::Timestamp::UNIX_EPOCH),
        limit_bytes: (flags & 4 != 0).then_some(u64::from(*cut) * 3),
        timestamps: flags & 8 != 0,
        streams: if flags & 16 != 0 { LogStreams::Only(LineStream::Stderr) } else { LogStreams::All },
        follow: false,
    };
    let read = |size: usize| {
        let (mut filter, mut out) = (Filter::new(&options), Vec::new());
        let result = log.chunks(size).try_for_each(|piece| filter.push(piece, &mut out));
        result.and_then(|()| filter.finish(&mut out)).map(|()| out).map_err(drop)
    };
    let (whole, pieces) = (read(log.len().max(1)), read(usize::from(*cut) + 1));
    assert_eq!(whole, pieces, "the size of the pieces does not matter");
    if let (Ok(out), Some(limit)) = (&whole, options.limit_bytes) {
        assert!(out.len() as u64 <= limit);
    }
}
