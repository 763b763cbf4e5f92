//! Writes the demo images as an OCI archive: `cargo run --example images -- FILE`.

#[path = "../tests/kit/image.rs"]
#[allow(dead_code, reason = "the kit is shared with the tests")]
mod image;

use std::path::Path;

fn main() -> std::io::Result<()> {
    let target = std::env::args().nth(1).unwrap_or_else(|| "images.tar".to_owned());
    if let Some(folder) = Path::new(&target).parent() {
        std::fs::create_dir_all(folder)?;
    }
    image::write_archive(&[image::Image::busybox(image::BUSYBOX), image::Image::pause()], Path::new(&target))
}
