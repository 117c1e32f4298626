import asyncio
import threading

import pytest

from image_files import animation, data_url, encoded, noise
from outrider.media import loader as loader_module
from outrider.media.decoder import MediaDecoder
from outrider.media.frames import FrameSample
from outrider.media.images import image_from_pixels
from outrider.media.limits import InvalidMedia, MediaLimits
from outrider.media.loader import MediaItem, MediaLoader
from outrider.request import PromptTooLong
from patience import Hurdle, goes_on_while_held, until, wait_until
from video_files import clip, encoded_video


def image(seed: int = 0) -> MediaItem:
    return MediaItem("image", data_url(encoded(noise(seed=seed))))


def load(wanted, limits=None, use=lambda image: image.digest, **more):
    loader = MediaLoader(limits or MediaLimits(), use, **more)
    try:
        return asyncio.run(loader.load(wanted))
    finally:
        loader.close()


def test_images_come_in_order_and_equal_ones_have_equal_digests():
    digests = [image_from_pixels(noise(seed=seed)).digest for seed in (0, 1)]
    found = load([image(0), image(1), MediaItem("image", data_url(encoded(noise(), "BMP"), "image/bmp"))])
    assert found == [[digests[0]], [digests[1]], [digests[0]]]


def test_a_videos_frames_count_as_images():
    video = MediaItem("video", data_url(animation(4), "image/gif"))
    limits = MediaLimits(max_frames=3, max_images=3)
    assert [len(frames) for frames in load([video], limits)] == [3]
    with pytest.raises(InvalidMedia, match="4 images"):
        load([image(), video], limits)
    with pytest.raises(InvalidMedia, match="4 images"):
        load([image()] * 4, limits)


class EverySecondFrame:
    """Reads every second frame of a video, at most `max_frames`, as 8 x 6 pixels and ten tokens."""

    def sample(self, header, max_frames):
        numbers = tuple(range(0, header.num_frames, 2))[:max_frames]
        return FrameSample(numbers, 8, 6, num_tokens=10)

    def read(self, video):
        return video.header, video.numbers, video.frames.shape


def test_a_video_that_is_read_as_a_video_counts_as_one_image():
    videos = [
        MediaItem("video", data_url(animation(5), "image/gif")),
        MediaItem("video", data_url(encoded_video(clip(6), fps=12), "video/mp4")),
    ]
    limits = MediaLimits(max_frames=1, max_images=3)
    gif, mp4, picture = load([*videos, image()], limits, videos=EverySecondFrame())
    ((header, numbers, shape),) = gif
    assert (header.num_frames, header.fps, header.width, header.height) == (5, 20.0, 10, 6)
    assert (numbers, shape) == ((0, 2, 4), (3, 6, 8, 3))
    ((header, numbers, shape),) = mp4
    assert (header.num_frames, header.fps, header.width, header.height) == (6, 12.0, 64, 48)
    assert (numbers, shape) == ((0, 2, 4), (3, 6, 8, 3))
    assert picture == [image_from_pixels(noise(seed=0)).digest]


def test_frames_and_tokens_of_all_videos_are_counted_before_any_is_decoded(monkeypatch):
    monkeypatch.setattr(MediaDecoder, "decode_video", lambda *_: pytest.fail("a video was decoded"))
    video = MediaItem("video", data_url(animation(6), "image/gif"))
    with pytest.raises(InvalidMedia, match="6 frames to read; the limit is 5"):
        load([video, video], MediaLimits(max_video_frames=5), videos=EverySecondFrame())
    with pytest.raises(PromptTooLong, match="need 20 tokens and the context holds 16"):
        load([video, video], videos=EverySecondFrame(), max_context=16)


def test_a_video_without_a_frame_that_can_be_decoded_is_refused():
    data = encoded_video(clip(6))
    start = data.index(b"mdat") + 4
    size = int.from_bytes(data[start - 8 : start - 4], "big") - 8
    blank = data[:start] + bytes(size) + data[start + size :]  # the header is whole, the frames are zeros
    video = MediaItem("video", data_url(blank, "video/mp4"))
    with pytest.raises(InvalidMedia, match="damaged or has no frames"):
        load([video], videos=EverySecondFrame())


def test_one_bad_image_refuses_them_all_and_leaves_nothing_running():
    before = threading.active_count()

    async def go():
        loader = MediaLoader(MediaLimits(), lambda image: image)
        with pytest.raises(InvalidMedia):
            await loader.load([image(), MediaItem("image", "data:image/png;base64,AAAA"), image()])
        assert len(asyncio.all_tasks()) == 1
        loader.close()

    asyncio.run(go())
    wait_until(lambda: threading.active_count() <= before + 1)  # asyncio's own


def test_decoding_runs_off_the_event_loop_two_at_a_time():
    running, most, hurdle = [], [], Hurdle()

    def use(image):
        running.append(threading.current_thread())
        most.append(len(running))
        hurdle.stop()
        running.pop()

    async def go():
        loader = MediaLoader(MediaLimits(), use)
        work = asyncio.create_task(loader.load([image(seed) for seed in range(6)]))
        await until(lambda: len(running) == 2)
        await goes_on_while_held(hurdle)
        await work
        loader.close()

    asyncio.run(go())
    assert max(most) == 2


def test_the_event_loops_thread_never_decodes(monkeypatch):
    threads = []

    def watch(owner, work):
        real = getattr(owner, work)

        def watched(*args):
            threads.append(threading.current_thread())
            return real(*args)

        monkeypatch.setattr(owner, work, watched)

    watch(loader_module, "read_inline")
    for work in ("decode_image", "count_frames", "decode_frames"):
        watch(MediaDecoder, work)
    jpeg = MediaItem("image", data_url(encoded(noise(), "JPEG"), "image/jpeg"))
    load([jpeg, MediaItem("video", data_url(animation(2), "image/gif"))])
    assert len(threads) == 5
    assert all(thread.name.startswith("outrider-media") for thread in threads)


def test_all_fetches_together_have_a_time_limit(monkeypatch):
    async def never(url, limits):
        await asyncio.sleep(60)

    monkeypatch.setattr(loader_module, "fetch", never)
    with pytest.raises(InvalidMedia, match=r"within 0\.2 s"):
        load([MediaItem("image", "http://host/a.png")] * 3, MediaLimits(fetch_total_s=0.2))
