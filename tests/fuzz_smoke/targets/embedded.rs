//! Fuzz targets of the embedded runtime: layers, seccomp profiles, users, shim messages, and output.

use std::io;

use berth_proto::cri;
use berth_runtime::{
    images::{compression::Decompressor, tar::reader::TarReader, unpacker::path},
    launch::{ImageConfig, LaunchImage, users},
    seccomp::{Conditions, CpuArchitecture, SeccompProfile, compile},
};
use berth_shim::{
    exit_record::ExitRecord,
    plan,
    wire::{self, Datagram},
    worker::log_record::{Splitter, Tag},
};

use super::first_line;

/// An image layer: decompresses it, and parses its entries and their paths.
pub fn layer_entries(data: &[u8]) {
    let Ok(unpacked) = Decompressor::new(data) else { return };
    let mut reader = TarReader::new(io::Read::take(unpacked, 1 << 20));
    let mut entries = 0;
    while let Ok(Some(entry)) = reader.next_entry() {
        entries += 1;
        assert!(entries <= (1 << 20) / 512, "more entries than headers");
        if let Ok(parts) = path::parts(&entry.name) {
            assert!(parts.iter().all(|part| !matches!(*part, b"" | b"." | b"..") && !part.contains(&b'/')));
        }
        if let Some(map) = &entry.sparse {
            assert_eq!(map.pieces.iter().map(|(_, length)| length).sum::<u64>(), entry.size);
        }
    }
}

/// A seccomp profile: the compiled filter must be a program that the kernel accepts.
pub fn filter_profile(data: &[u8]) {
    let Ok(profile) = SeccompProfile::parse(data) else { return };
    for machine in [CpuArchitecture::X86_64, CpuArchitecture::Aarch64, CpuArchitecture::Riscv64] {
        let on = Conditions { machine, capabilities: vec!["SYS_ADMIN"], kernel: (6, 1), has_spec_allow: true };
        let Ok(filter) = compile(&profile, &on) else { continue };
        let program = &filter.instructions;
        assert!((1..=4096).contains(&program.len()) && filter.bytes().len() == program.len() * 8);
        for (at, i) in program.iter().enumerate() {
            let farthest = match i.code {
                0x06 => continue, // BPF_RET
                0x05 => i.k as usize,
                _ => usize::from(i.jump_true.max(i.jump_false)),
            };
            assert!(at + 1 + farthest < program.len(), "{i:?} at {at} leaves the program");
        }
    }
}

/// A line with an image's user, then the account files; the same text serves as passwd and group.
pub fn image_users(data: &[u8]) {
    let (user, rest) = first_line(data);
    let config = ImageConfig { user: user.into_owned(), ..Default::default() };
    let image = LaunchImage { config, passwd: rest.to_vec(), group: rest.to_vec(), ..Default::default() };
    let Ok(who) = users::identity(&cri::LinuxContainerSecurityContext::default(), &image, &[]) else { return };
    assert!(who.uid <= i32::MAX as u32 && who.groups.iter().all(|gid| *gid <= i32::MAX as u32));
    assert!(who.groups.is_sorted() && who.groups.contains(&who.gid));
    assert!(who.groups.windows(2).all(|pair| pair[0] < pair[1]));
}

/// Exit record of a container, perhaps written by another version.
pub fn shim_exit_record(data: &[u8]) {
    if let Some(record) = ExitRecord::parse(data) {
        assert_eq!(ExitRecord::parse(record.text().as_bytes()), Some(record));
    }
}

/// A datagram between a daemon and a shim of another version: a decoded message must survive a round trip.
pub fn shim_message(data: &[u8]) {
    fn body<T: serde::Serialize + serde::de::DeserializeOwned + PartialEq>(read: &Datagram<'_>) {
        let Ok(value) = read.body::<T>() else { return };
        // A compact encoding may exceed the size limit once it is written in full; the encoder rejects it.
        let Ok(bytes) = wire::write(read.kind, read.sequence, &value) else { return };
        let again = Datagram::read(&bytes).expect("ours");
        assert!((again.kind, again.sequence) == (read.kind, read.sequence));
        assert!(again.body::<T>().is_ok_and(|again| again == value), "another value");
    }
    let Ok(read) = Datagram::read(data) else { return };
    match read.kind {
        wire::DatagramKind::Request => body::<plan::ShimRequest>(&read),
        wire::DatagramKind::Reply => body::<plan::Reply>(&read),
        wire::DatagramKind::Event => body::<plan::ExitEvent>(&read),
    }
}

/// Container output: log records do not depend on the chunks of the read, and nothing is lost. The first byte is the
/// longest record.
pub fn shim_output(data: &[u8]) {
    let Some((longest, data)) = data.split_first() else { return };
    let longest = usize::from(*longest).max(1);
    let read = |piece: usize| {
        let (mut splitter, mut records) = (Splitter::new(longest), Vec::new());
        data.chunks(piece)
            .for_each(|chunk| splitter.feed(chunk, &mut |tag, record| records.push((tag, record.to_vec()))));
        splitter.finish(&mut |tag, record| records.push((tag, record.to_vec())));
        records
    };
    let records = read(data.len().max(1));
    assert!(read(7) == records, "it depends on how it was read");
    assert!(records.iter().all(|(_, record)| record.len() <= longest));
    let lines = records.iter().filter(|(tag, _)| *tag == Tag::Full).count();
    assert_eq!(lines, data.iter().filter(|byte| **byte == b'\n').count());
    let kept: usize = records.iter().map(|(_, record)| record.len()).sum();
    assert!(kept + 2 * lines >= data.len(), "only ends of lines are left out");
}
